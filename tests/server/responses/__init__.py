"""Stored responses."""
