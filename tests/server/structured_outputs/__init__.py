"""The gate in front of grammars."""
