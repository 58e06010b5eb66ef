"""Draft options of requests, and prediction counts in the usage of answers."""
