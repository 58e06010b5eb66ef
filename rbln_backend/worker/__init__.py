"""One rank: its worker, the assembly of its parts, and its step loops."""
