"""OpenAI's and Anthropic's batches: requests that run in rows that would be padding."""
