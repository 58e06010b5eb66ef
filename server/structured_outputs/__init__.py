"""The gate of structured outputs: what an answer is to obey is tried before it is promised."""
