"""KV tiers: prefixes that left the KV cache, or the process, kept in host memory and in files."""
