"""Strings and numbers: which of them satisfy a schema."""
