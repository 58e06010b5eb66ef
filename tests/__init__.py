"""The tests, and the builders and references that they share."""
