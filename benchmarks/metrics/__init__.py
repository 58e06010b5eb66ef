"""Measurements of the cost of metrics."""
