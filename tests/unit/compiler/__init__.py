"""Capture, lowering, programs, recording."""
