"""The engine's configuration for `check`, `compile` and `cache`, which start no engine.

They follow `serve` up to the loading of weights, so that all refuse the same models for the same
reasons.
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
from server.host.tasks import without_garbage_collection
from server.settings import ServerSettings, export_log_level

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import VllmConfig

T = TypeVar("T")


def with_config(
    argv: Sequence[str], settings: ServerSettings, use: Callable[[VllmConfig, Namespace], T]
) -> T:
    """Return the result of `use` for the configuration and the parsed flags of vLLM's `argv`.

    Raises `LaunchError` for every failure.
    """
    export_log_level(settings)
    with without_garbage_collection():
        _quiet_engine_logs(settings)
        try:
            # Before vLLM parses the flags, whose defaults come from the platform.
            api.refuse_twins()
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


def _quiet_engine_logs(settings: ServerSettings) -> None:
    """Set the log level of the engine's libraries to warning, unless `--log-level debug`."""
    # The package configures its loggers when it is imported.
    import vllm  # noqa: F401

    if settings.log_level != "debug":
        for name in ("vllm", "rbln_backend"):
            logging.getLogger(name).setLevel(logging.WARNING)
