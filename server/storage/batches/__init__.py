"""OpenAI's batches, whose requests run in padding rows."""
