"""Limits of API keys: requests in flight, requests and tokens per minute, and weights."""
