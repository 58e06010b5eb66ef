"""The graphs of a model: which there are, how they are made, which one a step takes."""
