"""Names of vLLM that this project uses, name by name, and what another release of it would break."""
