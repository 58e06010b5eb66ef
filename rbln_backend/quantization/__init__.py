"""Weights of 4 and 8 bits: which checkpoints are taken, and the layers that multiply by them."""
