"""What vLLM's layers are replaced by: attention, experts, and quantised weights."""
