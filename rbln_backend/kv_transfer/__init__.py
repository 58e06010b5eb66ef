"""KV blocks that go from the server that reads a prompt to the one that answers it."""
