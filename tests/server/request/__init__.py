"""What a request may hold: fields, sizes, media."""
