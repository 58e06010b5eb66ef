"""Tests of rbln_backend/gguf."""
