"""Metrics of the API process and of requests."""
