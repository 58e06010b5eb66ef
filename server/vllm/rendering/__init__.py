"""Chat templates as vLLM renders them: what they declare, and where large conversations go."""
