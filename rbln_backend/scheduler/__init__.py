"""Which requests a step runs: the device's rules over vLLM's scheduler."""
