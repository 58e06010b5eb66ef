"""Commands that call a running server: `chat`, `bench` and `buckets`."""
