"""Mixtures of experts without a model."""
