"""Drafters, and the texts that they may draft from."""
