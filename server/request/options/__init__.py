"""Fields of a body that set how the engine serves it: service tier and draft options."""
