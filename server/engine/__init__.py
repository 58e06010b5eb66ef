"""The engine: from flags to a running AsyncLLM in a process of its own, watched to its end."""
