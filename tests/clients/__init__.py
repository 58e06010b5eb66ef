"""What clients of other projects make of this server."""
