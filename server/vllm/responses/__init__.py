"""The Responses API over vLLM's serving class: its events and responses in OpenAI's form."""
