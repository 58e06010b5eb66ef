"""Answers of the Responses API that are kept: to be read again, continued, or made meanwhile."""
