"""A suite for any OpenAI-compatible server: `pytest tests/conformance --base-url URL`."""
