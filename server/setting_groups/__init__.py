"""The HTTP server's settings by concern; `server.settings` joins them into one frozen object."""
