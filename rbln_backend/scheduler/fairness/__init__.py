"""Weighted fair queueing between API keys."""
