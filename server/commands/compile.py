"""`rbln-serve compile`: fills the compile cache ahead of time.

Without an NPU, a folder with config.json and a tokenizer is enough. Progress goes to standard
error, the result to standard output.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rbln_backend import api
from server.commands.stdout import reserved_stdout
from server.commands.without_engine import with_config
from server.frontend import LaunchError
from server.settings import ServerSettings

if TYPE_CHECKING:
    from rbln_backend.api.reports import CompileReport


def compile_ahead(
    argv: Sequence[str], settings: ServerSettings, targets: Sequence[str], *, as_json: bool
) -> int:
    """Compile for vLLM's `argv`; `targets` names the CPUs to build kernels for.

    Returns 0 if everything is stored, 1 if not, 2 for invalid arguments.
    """
    with reserved_stdout() as out:
        try:
            report = with_config(argv, settings, lambda c, _: api.compile_model(c, targets))
        except LaunchError as error:
            sys.stderr.write(f"rbln-serve compile: error: {error}\n")
            return error.exit_code
        _print(report, out, as_json=as_json)
    return 1 if report.missing else 0


def _print(report: CompileReport, out: TextIO, *, as_json: bool) -> None:
    if as_json:
        out.write(json.dumps({"ok": not report.missing, **report.to_dict()}) + "\n")
        return
    total = len(report.compiled) + len(report.loaded)
    out.write(
        f"{total} graphs: {len(report.compiled)} compiled, {len(report.loaded)} were stored\n"
    )
    if report.kernels:
        out.write(f"kernels: {', '.join(report.kernels)}\n")
    if report.missing:
        out.write(
            f"not stored: {', '.join(report.missing)}; {report.cache_root} is full, cannot be "
            "written, or its limit is too low (VLLM_RBLN_CACHE_MAX_BYTES)\n"
        )
    else:
        out.write(f"stored in {report.cache_root}\n")
