"""Service tiers."""
