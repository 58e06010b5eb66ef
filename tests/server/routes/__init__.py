"""Routes that are ours alone."""
