"""Checks that a schema has the form of its draft."""
