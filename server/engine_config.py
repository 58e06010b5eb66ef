"""vLLM's parsed flags to its configuration, the same for `serve` and `check`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rbln_backend.errors import RblnError
from server.frontend import LaunchError
from server.model_files import check_model_folder
from server.settings import ServerSettings

if TYPE_CHECKING:
    from argparse import Namespace

    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs


def engine_config(
    args: Namespace, settings: ServerSettings, run_dir: Path | None
) -> tuple[AsyncEngineArgs, VllmConfig]:
    """Return the engine's arguments and configuration; slow, it asks the platform and the model.

    Workers leave their progress and metrics in `run_dir`. Raises `LaunchError` and whatever vLLM
    or the platform raise.
    """
    check_model_folder(args.model)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    engine_args = AsyncEngineArgs.from_cli_args(args)
    if run_dir is not None:
        engine_args.additional_config = _with_run_dir(engine_args.additional_config, run_dir)
    # An engine that gets the signal together with us must drain as we do.
    engine_args.shutdown_timeout = math.ceil(settings.drain_timeout_s)
    context = UsageContext.OPENAI_API_SERVER
    try:
        return engine_args, engine_args.create_engine_config(usage_context=context)
    except ValueError as error:
        if not isinstance(error, RblnError):
            _refuse_model(engine_args)
        raise


def _refuse_model(engine_args: AsyncEngineArgs) -> None:
    """Raise the platform's own reason against the model, if that is what it comes down to."""
    from vllm.platforms import current_platform

    refuse = getattr(current_platform, "refuse_model", None)
    if refuse is None:
        return
    try:
        model_config = engine_args.create_model_config()
    except (ValueError, OSError):
        # The model's own configuration is at fault, as the caller is about to say.
        return
    refuse(model_config)


def _with_run_dir(additional: Mapping[str, Any], run_dir: Path) -> dict[str, Any]:
    ours = additional.get("rbln", {})
    if not isinstance(ours, dict):
        raise LaunchError(
            f"--additional-config: 'rbln' must be an object, got {ours!r}", exit_code=2
        )
    return {**additional, "rbln": {**ours, "run_dir": str(run_dir)}}
