"""Flags of the commands: settings, the names of vLLM's flags, and help."""
