"""`rbln-parity`: the same prompts on a reference and on the RBLN path, compared token by token."""
