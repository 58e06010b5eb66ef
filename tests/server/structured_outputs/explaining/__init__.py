"""Explanations of constraints."""
