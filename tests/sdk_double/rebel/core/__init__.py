"""Compiling graphs, running them, and keeping what was compiled."""
