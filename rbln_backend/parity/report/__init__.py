"""The outcome of a parity run as text and JSON lines."""
