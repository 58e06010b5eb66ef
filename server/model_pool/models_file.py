"""The file of `--models`: the served models, their memory budget and the limits of waiting."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from server.host.regular_files import read_regular
from server.settings import SettingsError

_MAX_BYTES = 1 << 20
_MAX_MODELS = 256
_GIB = 1 << 30
_NAME = r"^[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}$"


def _words(value: object) -> object:
    """Return the words of a command line."""
    if isinstance(value, str):
        return tuple(shlex.split(value))
    return tuple(map(str, value)) if isinstance(value, list) else value


class ModelEntry(BaseModel):
    """One model: the name in requests, the checkpoint and its flags of `serve`.

    A `pinned` model is loaded at start and stays loaded. `memory_gib` is its memory while loaded;
    None: the estimate of `rbln-serve check`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=_NAME)
    path: str = Field(min_length=1)
    flags: Annotated[tuple[str, ...], BeforeValidator(_words)] = ()
    pinned: bool = False
    memory_gib: float | None = Field(None, gt=0, allow_inf_nan=False)

    @property
    def folder(self) -> str:
        """Name of the model's folder below --data-dir."""
        return quote(self.name, safe="")

    @property
    def stated_bytes(self) -> int | None:
        """Bytes that the file states for the loaded model."""
        return None if self.memory_gib is None else int(self.memory_gib * _GIB)


class ModelsFile(BaseModel):
    """All models; `memory_gib` is the memory that the loaded ones share.

    A request waits at most `max_wait_s` for its model, together with at most `max_waiting - 1`
    others for the same one. A loaded model stays for at least `min_resident_s`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_gib: float = Field(gt=0, allow_inf_nan=False)
    max_wait_s: float = Field(60.0, ge=0, allow_inf_nan=False)
    max_waiting: int = Field(256, ge=1)
    min_resident_s: float = Field(10.0, ge=0, allow_inf_nan=False)
    models: tuple[ModelEntry, ...] = Field(min_length=1, max_length=_MAX_MODELS)

    @property
    def budget_bytes(self) -> int:
        """Bytes that the loaded models share."""
        return int(self.memory_gib * _GIB)


def read_models_file(path: Path) -> ModelsFile:
    """Return the checked content of `path`. Raises `SettingsError`."""
    try:
        content = _content(path, read_regular(path, _MAX_BYTES).decode())
    except (OSError, ValueError) as error:
        raise SettingsError(f"--models {path} cannot be read: {error}") from None
    try:
        file = ModelsFile.model_validate(content)
    except ValidationError as error:
        problems = "; ".join(_problem(dict(item)) for item in error.errors())
        raise SettingsError(f"--models {path}: {problems}") from None
    names = [model.name for model in file.models]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise SettingsError(f"--models {path}: the name {twice[0]!r} is used twice")
    return file


def _content(path: Path, text: str) -> object:
    """Return the parsed text. Raises `ValueError`."""
    if path.suffix == ".json":
        return json.loads(text)
    import yaml

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _problem(error: Mapping[str, object]) -> str:
    place = error["loc"]
    where = ".".join(map(str, place)) if isinstance(place, tuple) else ""
    return f"{where or 'the file'}: {error['msg']}, got {error['input']!r:.100}"
