"""vLLM as the backend sees it: names by who needs them, and the ledger of what is replaced."""
