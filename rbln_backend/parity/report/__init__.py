"""The outcome of a parity run as text, JSON, JUnit and HTML."""
