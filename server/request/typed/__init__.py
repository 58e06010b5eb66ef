"""Objects nested in a request, checked against the types of its model."""
