"""Clients of servers, as processes."""
