"""Types of the HTTP API that every layer uses: endpoints, JSON objects, server-sent events."""
