"""Compilation: the compiler port, its adapters and captured programs."""
