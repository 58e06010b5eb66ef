"""One rank: the device, the weights, the graphs and the step loop."""
