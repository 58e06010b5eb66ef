"""Attention options and encoders."""
