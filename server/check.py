"""`rbln-serve check`: whether a model can run here and how, without reading its weights.

It takes the way of `serve` up to the point where weights would be loaded, so both refuse the same
models for the same reasons. Nothing but the answer goes to the standard output.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, TextIO

from server.engine_config import engine_config
from server.frontend import LaunchError
from server.launch_errors import launch_error
from server.settings import ServerSettings

if TYPE_CHECKING:
    from vllm.config import ModelConfig

    from rbln_backend.model_report import ModelReport

_LABEL_WIDTH = 16


def check(argv: Sequence[str], settings: ServerSettings, *, as_json: bool) -> int:
    """Print the verdict on vLLM's `argv`; return 0, 1 (cannot run) or 2 (wrong command line)."""
    with _answers_alone_on_stdout() as out:
        try:
            report = _inspect(argv, settings)
        except LaunchError as error:
            return _refuse(error, out, as_json=as_json)
        if as_json:
            out.write(json.dumps({"ok": True, "reason": None, **report.to_dict()}) + "\n")
        else:
            out.write("This model can run.\n")
            out.writelines(f"  {name:<{_LABEL_WIDTH}} {value}\n" for name, value in report.lines())
    return 0


def _refuse(error: LaunchError, out: TextIO, *, as_json: bool) -> int:
    if as_json:
        out.write(json.dumps({"ok": False, "reason": str(error)}) + "\n")
    elif error.exit_code == 1:
        out.write(f"This model cannot run: {error}\n")
    else:
        sys.stderr.write(f"rbln-serve check: error: {error}\n")
    return error.exit_code


def _inspect(argv: Sequence[str], settings: ServerSettings) -> ModelReport:
    """Raises `LaunchError`, whatever is wrong."""
    _quiet_engine_logs(settings)
    from server.vllm_flags import parse_arguments

    args = parse_arguments(argv, settings)
    try:
        _, config = engine_config(args, settings, None)
        from vllm.platforms import current_platform

        inspect = getattr(current_platform, "inspect_model", None)
        if inspect is None:
            name = type(current_platform).__name__
            raise LaunchError(
                f"vLLM runs on {name} here, not on the RBLN platform; see VLLM_PLUGINS", exit_code=2
            )
        report: ModelReport = inspect(config)
        _check_tokenizer(config.model_config)
    except Exception as error:
        # The boundary to vLLM, as in `server.engine`: every failure is a reason.
        logging.getLogger(__name__).debug("The check failed", exc_info=True)
        raise launch_error(error, args.model) from error
    return report


def _check_tokenizer(model_config: ModelConfig) -> None:
    if model_config.skip_tokenizer_init:
        return
    from vllm.tokenizers import cached_tokenizer_from_config

    try:
        cached_tokenizer_from_config(model_config)
    except Exception as error:
        # Each tokenizer library raises errors of its own, and all mean the same here.
        text = f"the tokenizer cannot be loaded: {type(error).__name__}: {error}"
        raise LaunchError(" ".join(text.split())) from error


def _quiet_engine_logs(settings: ServerSettings) -> None:
    """Let the engine's libraries warn; `--log-level debug` lets them talk."""
    # The package sets its loggers up when it is imported.
    import vllm.logger  # noqa: F401

    if settings.log_level != "debug":
        for name in ("vllm", "rbln_backend"):
            logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def _answers_alone_on_stdout() -> Iterator[TextIO]:
    """Yield the standard output; whatever libraries and children print goes to standard error."""
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
