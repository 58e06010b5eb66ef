"""One step: batches, inputs, the graph's run, samples and what is counted."""
