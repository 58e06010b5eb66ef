"""Converts vLLM's parsed flags to its configuration, and errors of a start to a one-line reason.

Our own errors are such lines already. vLLM wraps configuration errors in pydantic's, lists all its
architectures in one message, and reports only that an engine process failed.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import math
import re
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rbln_backend import api
from rbln_backend.api.names import MULTIMODAL, given_options, options_of_vllm
from rbln_backend.errors import RblnError
from rbln_backend.host.resources import vllm_build
from server.engine.weight_files import check_model_folder, get_model_config
from server.errors import clip
from server.frontend import LaunchError
from server.settings import ServerSettings

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs

_MIN_BACKLOG = 16384


def engine_config(
    args: Namespace, settings: ServerSettings, run_dir: Path | None
) -> tuple[AsyncEngineArgs, VllmConfig]:
    """Return the engine's arguments and configuration; takes seconds.

    Workers write progress and metrics to `run_dir`. Raises `LaunchError` and the exceptions of vLLM
    and the platform.
    """
    check_model_folder(args.model)
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    engine_args = AsyncEngineArgs.from_cli_args(args)
    options: dict[str, Any] = {}
    if engine_args.language_model_only:
        # vLLM ignores the flag for models without multimodal inputs.
        options["disable_mm"] = True
    if run_dir is not None:
        options["run_dir"] = str(run_dir)
        options["max_queue_ms"] = math.ceil(settings.max_queue_s * 1000)
    options |= _prefill_options(engine_args.additional_config, settings)
    if options:
        engine_args.additional_config = {
            **options_of_vllm(engine_args.additional_config),
            "rbln": {**given_options(engine_args.additional_config), **options},
        }
    transfer = engine_args.kv_transfer_config
    if transfer is not None and api.is_active():
        api.check_connectors(transfer)
    # An engine that receives the same signal must drain as long as the server.
    engine_args.shutdown_timeout = math.ceil(settings.drain_timeout_s)
    context = UsageContext.OPENAI_API_SERVER
    try:
        config = engine_args.create_engine_config(usage_context=context, headless=settings.headless)
        policy, most = settings.prefill_policy, settings.max_num_partial_prefills
        if config.model_config.runner_type == "pooling":
            if policy == "shortest" or most is not None:
                raise LaunchError(
                    "--prefill-policy shortest and --max-num-partial-prefills have no effect on a "
                    "pooling model, whose prompts are computed one after the other",
                    exit_code=2,
                )
        elif policy == "fcfs" and most is not None:
            raise LaunchError(
                f"--max-num-partial-prefills {most} has no effect with --prefill-policy fcfs",
                exit_code=2,
            )
        _limit_backlog(config, settings)
        return engine_args, config
    except (ValueError, LookupError, RuntimeError) as error:
        if not isinstance(error, RblnError):
            _refuse_model(engine_args, args)
        raise


def _prefill_options(additional: Mapping[str, Any], settings: ServerSettings) -> dict[str, Any]:
    """Return the options of the order of prompts that are given as flags of the server."""
    configured = given_options(additional)
    options: dict[str, Any] = {
        "prefill_policy": settings.prefill_policy,
        "max_num_partial_prefills": settings.max_num_partial_prefills,
    }
    options = {name: value for name, value in options.items() if value is not None}
    for name, value in options.items():
        if configured.get(name, value) != value:
            raise LaunchError(
                f"--{name.replace('_', '-')} {value} and {name} {configured[name]!r} in "
                "--additional-config are the same setting; give one of them",
                exit_code=2,
            )
    return options


def _limit_backlog(config: VllmConfig, settings: ServerSettings) -> None:
    """Set vLLM's limit of prompt tokens that wait for prefill."""
    scheduler = config.scheduler_config
    of_vllm, limit = scheduler.max_num_queued_tokens, settings.max_queued_tokens
    if of_vllm is not None and limit not in (None, of_vllm):
        raise LaunchError(
            f"--max-num-queued-tokens {of_vllm} and --max-queued-tokens {limit} are the same "
            "limit; give one of them",
            exit_code=2,
        )
    if of_vllm is None:
        scheduler.max_num_queued_tokens = limit
    # Not of pooling models, whose requests have many short prompts.
    if scheduler.max_num_queued_tokens is None and config.model_config.runner_type != "pooling":
        # What all sequences of all data-parallel ranks can hold.
        sequences = scheduler.max_num_seqs * config.parallel_config.data_parallel_size
        backlog = max(sequences * config.model_config.max_model_len, _MIN_BACKLOG)
        scheduler.max_num_queued_tokens = backlog


def _refuse_model(engine_args: AsyncEngineArgs, args: Namespace) -> None:
    """Raise the platform's reason to refuse the model, or a parser's, if there is one.

    vLLM makes the parser of reasoning while it makes the configuration.
    """
    if not api.is_active():
        return
    try:
        model_config = engine_args.create_model_config()
    except (ValueError, OSError):
        # The model's configuration is invalid; the caller raises that error.
        return
    api.refuse_model(model_config)
    if engine_args.reasoning_parser:
        from vllm.tokenizers import cached_tokenizer_from_config

        from server.vllm.tools import check_parsers

        check_parsers(args, cached_tokenizer_from_config(model_config), model_config)


_MAX_LENGTH = 600
_UNKNOWN = re.compile(r"Model architectures \['(\w+)'.*\] are not supported for now\.(.*)", re.S)
_BROKEN = re.compile(r"Model architectures \['(\w+)'.*\] failed to be inspected")
_UNKNOWN_TYPE = re.compile(r"model type `([^`]+)` but Transformers does not recognize")
_REMOTE_CODE = "contains custom code which must be executed"
_ENGINE_FAILED = "Engine core initialization failed"
# Errors of the hub's client, by name: it is not imported for this.
_HUB_ERRORS = frozenset(
    (
        "EntryNotFoundError",
        "GatedRepoError",
        "HFValidationError",
        "LocalEntryNotFoundError",
        "OfflineModeIsEnabled",
        "RepositoryNotFoundError",
        "RevisionNotFoundError",
    )
)
_MULTIMODAL_CONFIGS = ("vision_config", "audio_config", "speech_config")


def launch_error(error: Exception, model: str, reported: str | None = None) -> LaunchError:
    """Return `error` as the reason why `model` cannot be served.

    `reported` is the cause that a worker wrote to the run directory.
    """
    cause = error
    while isinstance(cause, ValidationError):
        # Pydantic's error has the one that was raised inside.
        inner = cause.errors()[0].get("ctx", {}).get("error")
        if not isinstance(inner, Exception):
            break
        cause = inner
    if isinstance(cause, LaunchError):
        return cause
    if reported is not None and _ENGINE_FAILED in str(cause):
        return LaunchError(_one_line(reported))
    return LaunchError(_one_line(_reason(cause, model)))


def _reason(cause: Exception, model: str) -> str:
    text = str(cause)
    if isinstance(cause, RblnError):
        return text
    if match := _UNKNOWN.search(text):
        near = difflib.get_close_matches(match[1], re.findall(r"'(\w+)'", match[2]), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "use a model that it has"
        return (
            f"architecture {match[1]!r} of config.json is unknown to vLLM {vllm_build().version}; "
            f"{hint}"
        )
    if match := _BROKEN.search(text):
        return _broken_architecture(match[1], model)
    if match := _UNKNOWN_TYPE.search(text):
        version = importlib.metadata.version("transformers")
        return (
            f"model_type {match[1]!r} of config.json is unknown to transformers {version}; "
            "correct it, or use a model that this version knows"
        )
    if _REMOTE_CODE in text:
        return (
            f"MODEL {model!r} contains Python code; add --trust-remote-code if you trust its author"
        )
    if type(cause).__name__.startswith("StrictDataclass") and cause.__cause__ is not None:
        return f"config.json: {cause.__cause__}"
    if type(cause).__name__ in _HUB_ERRORS:
        return (
            f"MODEL {model!r} is no directory, and loading it from the Hugging Face hub failed: "
            f"{text}"
        )
    # vLLM reports user errors as ValueError; for other exceptions the type is informative.
    return text if type(cause) is ValueError else f"{type(cause).__name__}: {text}"


def _broken_architecture(name: str, model: str) -> str:
    # vLLM imports a model's code to inspect it; code of vision towers needs packages that are not
    # installed without multimodal inputs.
    if any(key in get_model_config(model) for key in _MULTIMODAL_CONFIGS):
        return str(MULTIMODAL.refusal(f"architecture {name!r}"))
    return f"architecture {name!r} cannot be imported by vLLM; its log above has the cause"


def _one_line(text: str) -> str:
    return clip(" ".join(text.split()), _MAX_LENGTH)
