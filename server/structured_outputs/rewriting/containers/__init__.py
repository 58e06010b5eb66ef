"""Arrays and objects: their shapes, counts and rules."""
