"""What `check`, `compile` and `cache` share: a configuration as an engine would get it.

They take the way of `serve` up to the point where weights would be loaded, so all refuse the same
models for the same reasons.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from rbln_backend import api
from rbln_backend.errors import PlatformError
from server.engine.config import engine_config
from server.engine.launch_errors import launch_error
from server.frontend import LaunchError
from server.host.importing import uncollected
from server.settings import ServerSettings, hand_on_log_level
from server.vllm.importing import import_vllm

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import VllmConfig

T = TypeVar("T")


def ask_backend(
    argv: Sequence[str], settings: ServerSettings, ask: Callable[[VllmConfig, Namespace], T]
) -> T:
    """Return what `ask` makes of the configuration that vLLM's `argv` describe, and of its flags.

    Raises `LaunchError`, whatever is wrong.
    """
    hand_on_log_level(settings)
    with uncollected():
        _quiet_engine_logs(settings)
        try:
            # Before the flags are read, which asks the platform for their defaults.
            api.refuse_twins()
        except PlatformError as error:
            raise LaunchError(str(error), exit_code=2) from error
        from server.vllm.flags import parse_arguments

        args = parse_arguments(argv, settings)
    try:
        with uncollected():
            config = engine_config(args, settings, None)[1]
        return ask(config, args)
    except PlatformError as error:
        raise LaunchError(str(error), exit_code=2) from error
    except Exception as error:
        # The boundary to vLLM, as in `server.engine.launch`: every failure is a reason.
        logging.getLogger(__name__).debug("The command failed", exc_info=True)
        raise launch_error(error, args.model) from error


def _quiet_engine_logs(settings: ServerSettings) -> None:
    """Let the engine's libraries warn; `--log-level debug` lets them talk."""
    # The package sets its loggers up when it is imported.
    import_vllm()
    if settings.log_level != "debug":
        for name in ("vllm", "rbln_backend"):
            logging.getLogger(name).setLevel(logging.WARNING)
