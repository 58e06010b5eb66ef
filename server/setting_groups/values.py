"""Types of settings: lists, secrets and paths.

A list is a JSON array or separated by commas; its flag may be repeated.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, SecretStr
from pydantic_settings import NoDecode


def _split(value: object) -> object:
    """Return the items of a list in a flag or a variable."""
    if isinstance(value, list | tuple):
        return [item for part in value for item in _items(part)]
    return _items(value)


def _items(value: object, *, keep_empty: bool = False) -> list[object]:
    if not isinstance(value, str):
        return [value]
    if value.lstrip().startswith("["):
        try:
            return list(json.loads(value))
        except ValueError:
            pass
    return [item.strip() for item in value.split(",") if keep_empty or item.strip()]


def _secrets(value: object) -> object:
    """Return the secrets of a list; refuses empty ones, which come from unset shell variables."""
    parts = value if isinstance(value, list | tuple) else [value]
    secrets = [item for part in parts for item in _items(part, keep_empty=True)]
    if not secrets or not all(_revealed(secret).strip() for secret in secrets):
        raise ValueError("an empty value; leave flag and variable out to have none")
    return secrets


def _revealed(secret: object) -> str:
    return secret.get_secret_value() if isinstance(secret, SecretStr) else str(secret)


def _not_empty(value: object) -> object:
    """Refuse the empty path, which would mean the working directory."""
    if isinstance(value, str) and not value.strip():
        raise ValueError("an empty path; leave flag and variable out to have none")
    return value


Words = Annotated[tuple[str, ...], NoDecode, BeforeValidator(_split)]
Secrets = Annotated[tuple[SecretStr, ...], NoDecode, BeforeValidator(_secrets)]
OptionalPath = Annotated[Path | None, BeforeValidator(_not_empty)]


def _ssl_requirement(value: object) -> object:
    """Return the name of a constant of Python's `ssl`, which vLLM's flag takes."""
    return {"0": "none", "1": "optional", "2": "required"}.get(str(value), value)


ClientCertificates = Annotated[
    Literal["none", "optional", "required"], BeforeValidator(_ssl_requirement)
]
