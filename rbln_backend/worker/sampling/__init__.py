"""Sampling on the host: rows of requests, grammar masks, the sampler, prompt log-probabilities."""
