"""Measurements over HTTP."""
