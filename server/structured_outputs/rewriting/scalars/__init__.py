"""Strings and numbers that satisfy a schema."""
