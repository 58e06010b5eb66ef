"""Request bodies: the forms of every endpoint, its fields, their sizes and values."""
