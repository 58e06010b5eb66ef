"""Connections: the listener, its limits, and what is said before there is a request."""
