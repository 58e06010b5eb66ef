"""Several HTTP processes for one engine: `--api-server-count`."""
