"""Tools of requests."""
