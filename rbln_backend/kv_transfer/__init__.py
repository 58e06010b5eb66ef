"""KV in other memory: NIXL between servers, and tiers in host memory and in files."""
