"""vLLM as the backend sees it."""
