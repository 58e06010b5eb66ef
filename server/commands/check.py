"""`rbln-serve check` and `compile`: whether a model can be served, and its graphs ahead of time.

They follow `serve` up to the loading of weights, so that all refuse the same models for the same
reasons. A folder with config.json and a tokenizer is enough, but for an NPU. Results go to standard
output, all else to standard error.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO, TypeVar

from rbln_backend import api
from rbln_backend.api.names import ModelReport
from rbln_backend.errors import PlatformError
from server.engine.config import engine_config, launch_error
from server.engine.weight_files import WeightFiles, check_weight_files
from server.frontend import LaunchError
from server.host.tasks import without_garbage_collection
from server.settings import ServerSettings, export_log_level
from server.tools import ToolSupport

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig


@contextmanager
def reserved_stdout() -> Iterator[TextIO]:
    """Yield standard output; output of libraries and child processes goes to standard error."""
    sys.stdout.flush()
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        with os.fdopen(os.dup(answers), "w", encoding="utf-8") as out:
            yield out
    finally:
        sys.stdout.flush()
        os.dup2(answers, 1)
        os.close(answers)


T = TypeVar("T")


def with_config(
    argv: Sequence[str], settings: ServerSettings, use: Callable[[VllmConfig, Namespace], T]
) -> T:
    """Return the result of `use` for the configuration and the parsed flags of vLLM's `argv`.

    Raises `LaunchError` for every failure.
    """
    export_log_level(settings)
    with without_garbage_collection():
        # The package configures its loggers when it is imported.
        import vllm  # noqa: F401

        if settings.log_level != "debug":
            for name in ("vllm", "rbln_backend"):
                logging.getLogger(name).setLevel(logging.WARNING)
        try:
            # Before vLLM parses the flags, whose defaults come from the platform.
            api.refuse_second_plugin()
        except PlatformError as error:
            raise LaunchError(str(error), exit_code=2) from error
        from server.vllm.flags import parse_arguments

        args = parse_arguments(argv, settings)
    try:
        with without_garbage_collection():
            config = engine_config(args, settings, None)[1]
        return use(config, args)
    except PlatformError as error:
        raise LaunchError(str(error), exit_code=2) from error
    except Exception as error:
        # The boundary to vLLM, as in `server.engine.launch`: every failure becomes a reason.
        logging.getLogger(__name__).debug("The command failed", exc_info=True)
        raise launch_error(error, args.model) from error


_LABEL_WIDTH = 16


def check(argv: Sequence[str], settings: ServerSettings, *, as_json: bool) -> int:
    """Print the result for vLLM's `argv`; return 0, 1 (cannot run) or 2 (invalid arguments)."""
    with reserved_stdout() as out:
        try:
            report, files, tools = with_config(
                argv, settings, lambda config, args: _inspect(config, args, settings)
            )
        except LaunchError as error:
            if as_json:
                out.write(json.dumps({"ok": False, "reason": str(error)}) + "\n")
            elif error.exit_code == 1:
                out.write(f"This model cannot run: {error}\n")
            else:
                sys.stderr.write(f"rbln-serve check: error: {error}\n")
            return error.exit_code
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
            reason = f"cannot run: {'; '.join(problems)}" if problems else "can run."
            out.write(f"This model {reason}\n")
            lines = [*report.lines(), *([] if tools is None else [("tools", str(tools))])]
            lines += [("warning", text) for text in warnings]
            out.writelines(f"  {name:<{_LABEL_WIDTH}} {value}\n" for name, value in lines)
    return 1 if problems else 0


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

    from server.vllm.tools import check_parsers, choose_tools, template_tokenizer

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
        if as_json:
            out.write(json.dumps({"ok": not report.missing, **report.to_dict()}) + "\n")
            return 1 if report.missing else 0
        compiled, stored = len(report.compiled), len(report.loaded)
        out.write(f"{compiled + stored} graphs: {compiled} compiled, {stored} were stored\n")
        if report.kernels:
            out.write(f"kernels: {', '.join(report.kernels)}\n")
        if report.missing:
            out.write(
                f"not stored: {', '.join(report.missing)}; {report.cache_root} is full, cannot be "
                "written, or its limit is too low (VLLM_RBLN_CACHE_MAX_BYTES)\n"
            )
        else:
            out.write(f"stored in {report.cache_root}\n")
    return 1 if report.missing else 0
