"""The HTTP layer: listener, TLS, connection limits, authentication, middlewares and streams."""
