"""Checks of a checkpoint's config.json before the engine's libraries are imported.

Hugging Face's error for a folder that is no checkpoint names neither the file nor the problem.
"""

from __future__ import annotations

import json
from pathlib import Path

from server.errors import json_type
from server.frontend import LaunchError
from server.wire.endpoint import JsonObject

_CONFIG = "config.json"
# Mistral's format.
_OTHER_CONFIGS = ("params.json",)


def check_model_folder(model: str) -> None:
    """Raise `LaunchError` when `model` is a folder without a readable configuration.

    Names of models on the Hugging Face hub pass: they are not downloaded yet.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return
    path = folder / _CONFIG
    if not path.is_file():
        if any((folder / name).is_file() for name in _OTHER_CONFIGS):
            return
        raise LaunchError(f"MODEL {model!r}: the folder has no {_CONFIG}, so it is no checkpoint")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(f"MODEL {model!r}: {_CONFIG} cannot be read: {error}") from None
    if not isinstance(content, dict):
        kind = json_type(content)
        raise LaunchError(f"MODEL {model!r}: {_CONFIG} must hold a JSON object, not {kind}")


def model_config_of(model: str) -> JsonObject:
    """Return the folder's config.json; empty for a model on the hub."""
    path = Path(model).expanduser() / _CONFIG
    if not path.is_file():
        return {}
    content: JsonObject = json.loads(path.read_text(encoding="utf-8"))
    return content
