"""Commands that call a running server: `buckets`."""
