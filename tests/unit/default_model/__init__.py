"""Tests of the default model."""
