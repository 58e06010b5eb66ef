"""Sampling parameters of a request, checked before the engine has them."""
