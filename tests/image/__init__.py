"""The container image and what starts it."""
