"""`python -m server`: the same as the `rbln-serve` command."""

from __future__ import annotations

from server.commands.cli import main

# The engine process imports this module again under another name; it must not serve twice.
if __name__ == "__main__":
    raise SystemExit(main())
