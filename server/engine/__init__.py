"""Launch, self-test, monitoring and shutdown of the engine process behind AsyncLLM."""
