"""Commands that call a running server: `chat` and `bench`."""
