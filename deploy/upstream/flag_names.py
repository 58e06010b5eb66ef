"""`python -m deploy.upstream.flag_names`: write the names of the installed vLLM's flags."""

from __future__ import annotations

import sys

from server.commands.command_line.flag_names import BENCH_FLAGS, SERVE_FLAGS


def main() -> int:
    """Write both lists; return the exit code."""
    from server.commands.clients.bench import bench_parser
    from server.vllm.flags import serve_parser

    for file, parser in ((SERVE_FLAGS, serve_parser()), (BENCH_FLAGS, bench_parser())):
        names = sorted(parser._option_string_actions)
        file.write_text("".join(f"{name}\n" for name in names), encoding="ascii")
        sys.stdout.write(f"{file.name}: {len(names)} flags\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
