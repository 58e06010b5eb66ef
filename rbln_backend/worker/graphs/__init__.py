"""The graphs of a model: the plan of all graphs, their capture or load, and their dispatch."""
