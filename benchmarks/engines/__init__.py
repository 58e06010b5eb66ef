"""Engines and servers of the compared sides, as processes."""
