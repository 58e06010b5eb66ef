"""OpenAI's and Anthropic's batches, whose requests run in padding rows."""
