"""Bucketing: which batch and chunk sizes are compiled, and which one a step runs in."""
