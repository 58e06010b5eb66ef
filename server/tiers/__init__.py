"""Service tiers: parsing, and the tiers that an API key may use."""
