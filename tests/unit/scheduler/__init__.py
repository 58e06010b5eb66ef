"""The device's rules over vLLM's scheduler."""
