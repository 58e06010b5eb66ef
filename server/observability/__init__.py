"""Metrics, logs, traces and traffic history of the server."""
