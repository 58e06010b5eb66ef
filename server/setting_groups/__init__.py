"""The HTTP server's settings by topic; `server.settings` combines them into one frozen object."""
