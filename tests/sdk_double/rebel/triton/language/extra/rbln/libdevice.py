"""The device library of kernels, of which nothing is called."""
