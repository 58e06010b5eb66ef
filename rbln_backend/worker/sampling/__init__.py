"""Sampling on the host: persistent batch, grammar masks, sampler, prompt log-probabilities."""
