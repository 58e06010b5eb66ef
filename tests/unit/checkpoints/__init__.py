"""Tests of rbln_backend/checkpoints."""
