"""Logprobs of prompts and long answers, made and serialised in slices in a thread."""
