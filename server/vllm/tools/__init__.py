"""Tool calls in answers: their parsers, and how an answer that was cut is reported."""
