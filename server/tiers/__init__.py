"""Who comes first: service tiers, which of them a key may use, what a request asks for."""
