"""Measurements of engines without HTTP."""
