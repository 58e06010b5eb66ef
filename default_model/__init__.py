"""The small Llama model that is served by default: its text, how it is trained, its checkpoint."""
