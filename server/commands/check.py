"""`rbln-serve check`: reports whether and how a model can be served, without its weights.

It refuses the same models as `serve`, see `server.commands.without_engine`.
"""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, TextIO

from rbln_backend import api
from server.commands.stdout import reserved_stdout
from server.commands.without_engine import with_config
from server.engine.weight_files import WeightFiles, check_weight_files
from server.frontend import LaunchError
from server.settings import ServerSettings

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import ModelConfig, VllmConfig

    from rbln_backend.api.reports import ModelReport
    from server.tools import ToolSupport

_LABEL_WIDTH = 16


def check(argv: Sequence[str], settings: ServerSettings, *, as_json: bool) -> int:
    """Print the result for vLLM's `argv`; return 0, 1 (cannot run) or 2 (invalid arguments)."""
    with reserved_stdout() as out:
        try:
            report, files, tools = with_config(
                argv, settings, lambda config, args: _inspect(config, args, settings)
            )
        except LaunchError as error:
            return _refuse(error, out, as_json=as_json)
        problems = [*files.problems, *report.problems]
        warnings = [*files.warnings, *report.warnings, *_port_warnings(settings)]
        if as_json:
            result = {
                "ok": not problems,
                "reason": "; ".join(problems) or None,
                **report.to_dict(),
                "tools": None if tools is None else tools.to_dict(),
                "problems": problems,
                "warnings": warnings,
            }
            out.write(json.dumps(result) + "\n")
        else:
            lines = [*report.lines(), *([] if tools is None else [("tools", str(tools))])]
            _print(lines, problems, warnings, out)
    return 1 if problems else 0


def _print(
    lines: Sequence[tuple[str, str]], problems: Sequence[str], warnings: Sequence[str], out: TextIO
) -> None:
    if problems:
        out.write(f"This model cannot run: {'; '.join(problems)}\n")
    else:
        out.write("This model can run.\n")
    out.writelines(f"  {name:<{_LABEL_WIDTH}} {value}\n" for name, value in lines)
    out.writelines(f"  {'warning':<{_LABEL_WIDTH}} {text}\n" for text in warnings)


def _port_warnings(settings: ServerSettings) -> list[str]:
    """Return a warning if the port cannot be bound; it may be free at the time of a start."""
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((settings.host, settings.port))
        except OSError as error:
            return [f"--port {settings.port} on {settings.host} cannot be bound now: {error}"]
    return []


def _refuse(error: LaunchError, out: TextIO, *, as_json: bool) -> int:
    if as_json:
        out.write(json.dumps({"ok": False, "reason": str(error)}) + "\n")
    elif error.exit_code == 1:
        out.write(f"This model cannot run: {error}\n")
    else:
        sys.stderr.write(f"rbln-serve check: error: {error}\n")
    return error.exit_code


def _inspect(
    config: VllmConfig, args: Namespace, settings: ServerSettings
) -> tuple[ModelReport, WeightFiles, ToolSupport | None]:
    # Before the model, whose graphs depend on the tokenizer: its errors are named here.
    tools = _check_tokenizer(config.model_config, args, settings)
    report = api.inspect_model(config)
    if config.load_config.load_format == "dummy":
        return report, WeightFiles(), tools
    return report, check_weight_files(config.model_config.model, report.dtype), tools


def _check_tokenizer(
    model_config: ModelConfig, args: Namespace, settings: ServerSettings
) -> ToolSupport | None:
    """Return the tool support of a model that generates text, None for others."""
    if model_config.skip_tokenizer_init:
        return None
    from vllm.tokenizers import cached_tokenizer_from_config

    from server.vllm.tool_prompt import check_parsers, choose_tools, template_tokenizer

    try:
        tokenizer = cached_tokenizer_from_config(model_config)
    except Exception as error:
        # Each tokenizer library raises its own exception types.
        text = f"the tokenizer cannot be loaded: {type(error).__name__}: {error}"
        raise LaunchError(" ".join(text.split())) from error
    if model_config.runner_type != "generate":
        return None
    by_template = template_tokenizer(model_config, tokenizer)
    tools = choose_tools(args, by_template, model_config, settings)
    check_parsers(args, tokenizer, model_config)
    return tools
