"""What `check`, `compile` and `cache` share: a configuration without an engine, and clean output.

They take the way of `serve` up to the point where weights would be loaded, so all refuse the same
models for the same reasons. Nothing but the answer goes to the standard output.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, TypeVar

from server.engine.config import engine_config
from server.engine.launch_errors import launch_error
from server.frontend import LaunchError
from server.settings import ServerSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig

T = TypeVar("T")
Ask = Callable[["type[Any]", "VllmConfig"], T]


def ask_platform(argv: Sequence[str], settings: ServerSettings, ask: Ask[T]) -> T:
    """Return `ask(platform, config)` for the configuration that vLLM's `argv` describe.

    Raises `LaunchError`, whatever is wrong.
    """
    _quiet_engine_logs(settings)
    from server.vllm.flags import parse_arguments

    args = parse_arguments(argv, settings)
    try:
        _, config = engine_config(args, settings, None)
        from vllm.platforms import current_platform

        # vLLM's platforms answer None for names that they do not have.
        if getattr(current_platform, "inspect_model", None) is None:
            name = type(current_platform).__name__
            raise LaunchError(
                f"vLLM runs on {name} here, not on the RBLN platform; see VLLM_PLUGINS", exit_code=2
            )
        return ask(type(current_platform), config)
    except Exception as error:
        # The boundary to vLLM, as in `server.engine.launch`: every failure is a reason.
        logging.getLogger(__name__).debug("The command failed", exc_info=True)
        raise launch_error(error, args.model) from error


def _quiet_engine_logs(settings: ServerSettings) -> None:
    """Let the engine's libraries warn; `--log-level debug` lets them talk."""
    # The package sets its loggers up when it is imported.
    import vllm.logger  # noqa: F401

    if settings.log_level != "debug":
        for name in ("vllm", "rbln_backend"):
            logging.getLogger(name).setLevel(logging.WARNING)


@contextmanager
def answers_alone_on_stdout() -> Iterator[TextIO]:
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
