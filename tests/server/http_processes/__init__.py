"""Several HTTP processes for one engine."""
