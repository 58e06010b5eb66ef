"""Adapter configurations and slots."""
