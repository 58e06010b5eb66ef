"""Grammar backends of the engine."""
