"""Reports on a model, its memory and its stored graphs, and precompilation, without an engine."""
