"""Compilation: the compiler port, its adapters, cache keys and the artifact store."""
