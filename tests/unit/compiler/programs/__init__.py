"""Programs: their stored form, its check, and the calls that run them."""
