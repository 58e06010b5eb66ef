"""Log-probabilities: texts of tokens, the most likely tokens, and those of prompts in streams."""
