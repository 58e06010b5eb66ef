"""Behaviour under overload."""
