"""Checkpoints to measure with, built once."""
