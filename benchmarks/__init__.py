"""Measurements of this project against its peers; each module with a ``main`` is one command."""
