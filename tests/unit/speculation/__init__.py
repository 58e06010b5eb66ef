"""Drafters, and what they may see."""
