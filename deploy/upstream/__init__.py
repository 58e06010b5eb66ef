"""What this project uses of vLLM, name by name, and what another release of it would break."""
