"""Scenarios: each fills the figures of one saved result."""
