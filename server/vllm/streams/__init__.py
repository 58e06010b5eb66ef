"""Stream frames: chunks without pydantic models, additional fields, span attributes."""
