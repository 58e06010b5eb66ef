"""Tools of requests, and which of them an answer may call."""
