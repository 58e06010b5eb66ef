"""The small Llama checkpoint that is built from this repository and served by default."""
