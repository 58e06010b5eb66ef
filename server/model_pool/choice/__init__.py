"""Which model a request is for."""
