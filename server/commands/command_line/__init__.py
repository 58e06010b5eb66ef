"""Flags of the commands: settings, the names of vLLM's flags, help and completion."""
