"""Fields of each API: one table, and the checks that read it."""
