"""All that a request may hold: the forms of every endpoint, its fields, their sizes and values."""
