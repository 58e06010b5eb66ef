"""Fields of a body that set how the engine serves it."""
