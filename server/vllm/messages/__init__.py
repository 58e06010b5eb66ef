"""Anthropic's API over vLLM's chats: requests made chats of, and answers made messages of."""
