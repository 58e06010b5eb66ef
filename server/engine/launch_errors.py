"""Converts exceptions of a failed launch to a one-line reason.

Our own errors are such lines already. vLLM wraps configuration errors in pydantic's, lists all its
architectures in one message, and reports only that an engine process failed.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import re

from pydantic import ValidationError

from rbln_backend.api.models import MULTIMODAL
from rbln_backend.errors import RblnError
from rbln_backend.host.resources import vllm_build
from server.engine.weight_files import model_config_of
from server.frontend import LaunchError

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
    cause = _unwrapped(error)
    if isinstance(cause, LaunchError):
        return cause
    if reported is not None and _ENGINE_FAILED in str(cause):
        return LaunchError(_one_line(reported))
    return LaunchError(_one_line(_reason(cause, model)))


def _unwrapped(error: Exception) -> Exception:
    """Return the exception inside pydantic's validation errors."""
    while isinstance(error, ValidationError):
        inner = error.errors()[0].get("ctx", {}).get("error")
        if not isinstance(inner, Exception):
            break
        error = inner
    return error


def _reason(cause: Exception, model: str) -> str:
    text = str(cause)
    if isinstance(cause, RblnError):
        return text
    if found := _UNKNOWN.search(text):
        near = difflib.get_close_matches(found[1], re.findall(r"'(\w+)'", found[2]), n=1)
        hint = f"did you mean {near[0]!r}?" if near else "use a model that it has"
        return (
            f"architecture {found[1]!r} of config.json is unknown to vLLM {vllm_build().version}; "
            f"{hint}"
        )
    if found := _BROKEN.search(text):
        return _broken_architecture(found[1], model)
    if found := _UNKNOWN_TYPE.search(text):
        version = importlib.metadata.version("transformers")
        return (
            f"model_type {found[1]!r} of config.json is unknown to transformers {version}; "
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
    if any(key in model_config_of(model) for key in _MULTIMODAL_CONFIGS):
        return str(MULTIMODAL.refusal(f"architecture {name!r}"))
    return f"architecture {name!r} cannot be imported by vLLM; its log above has the cause"


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_LENGTH else f"{line[: _MAX_LENGTH - 3]}..."
