"""The names of vLLM that this project uses, and what another release of vLLM would break."""
