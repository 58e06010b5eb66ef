"""Grammar backend for structured outputs, and the trial of a grammar before its use."""
