"""Draft options of requests; the engine verifies several draft tokens at a time."""
