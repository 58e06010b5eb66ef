"""Scenarios of the targets: each fills the figures of one saved result."""
