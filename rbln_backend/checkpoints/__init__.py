"""Checkpoints that `rbln-serve fetch` downloads, or writes of GGUF files."""
