"""Grammars of custom tools as JSON text."""
