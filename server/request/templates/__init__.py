"""Chat templates: the variables that a request may set."""
