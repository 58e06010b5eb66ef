"""Device time by API key and model, hour by hour."""
