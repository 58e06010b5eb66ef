"""`python -m deploy.upstream.flag_names`: write the names of the installed vLLM's flags."""

from __future__ import annotations

import sys

from server.commands.flags import SERVE_FLAGS


def main() -> int:
    """Write the list; return the exit code."""
    from server.vllm.flags import serve_parser

    names = sorted(serve_parser()._option_string_actions)
    SERVE_FLAGS.write_text("".join(f"{name}\n" for name in names), encoding="ascii")
    sys.stdout.write(f"{SERVE_FLAGS.name}: {len(names)} flags\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
