"""Connections, on both event loops."""
