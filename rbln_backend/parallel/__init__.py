"""Parallel ranks: the collectives of their graphs, and the channels that carry them."""
