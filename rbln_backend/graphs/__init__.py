"""Graphs: capture, programs as data, tensors by name, and the cache on disk."""
