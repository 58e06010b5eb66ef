"""Jobs in processes."""
