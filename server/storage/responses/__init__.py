"""Stored responses of the Responses API: retrieval, conversations and background runs."""
