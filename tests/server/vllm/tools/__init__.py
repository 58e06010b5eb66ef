"""The adapter of vLLM's serving layer."""
