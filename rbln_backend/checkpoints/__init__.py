"""Checkpoints that are made here: of GGUF files, and of what `rbln-serve fetch` downloads."""
