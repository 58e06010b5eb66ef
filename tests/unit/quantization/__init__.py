"""Quantised weights without a model."""
