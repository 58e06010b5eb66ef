"""Changes of the compiled sizes while the engine serves."""
