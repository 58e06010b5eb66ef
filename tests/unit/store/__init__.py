"""Artifacts, kernels and bundles on disk."""
