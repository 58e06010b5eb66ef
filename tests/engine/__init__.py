"""Tests over whole engines."""
