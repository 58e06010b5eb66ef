"""Attention on RBLN devices: the vLLM backend, its step metadata and the custom ops."""
