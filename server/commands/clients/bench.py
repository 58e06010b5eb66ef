"""`rbln-serve bench`: vLLM's own client, `vllm bench serve`, with the same flags.

It imports vLLM, so a running server on the same machine should not share its cores.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from server.commands.command_line.flag_names import (
    BENCH_FLAGS,
    UnknownFlagError,
    read_flags,
    require_known,
)
from server.settings import silence_vllm

if TYPE_CHECKING:
    from vllm.utils.argparse_utils import FlexibleArgumentParser

_PROG = "rbln-serve bench"


def bench(argv: Sequence[str]) -> int:
    """Run the client; return 0, 1 (failed) or 2 (invalid command line)."""
    try:
        require_known(argv, read_flags(BENCH_FLAGS))
    except UnknownFlagError as error:
        sys.stderr.write(f"{_PROG}: error: {error}\n")
        return 2
    silence_vllm()
    parser = bench_parser()
    args = parser.parse_args(list(argv))
    from vllm.benchmarks.serve import main

    try:
        main(args)
    except (OSError, RuntimeError, ValueError) as error:
        sys.stderr.write(f"{_PROG}: error: {error}\n")
        return 1
    return 0


def bench_parser() -> FlexibleArgumentParser:
    """Return vLLM's parser of `vllm bench serve`."""
    from vllm.benchmarks.serve import add_cli_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = FlexibleArgumentParser(
        prog=_PROG, description="Measure a running server. The flags are those of vllm bench serve."
    )
    add_cli_args(parser)
    return parser
