"""The gate of structured outputs: compiles grammars before the engine receives them."""
