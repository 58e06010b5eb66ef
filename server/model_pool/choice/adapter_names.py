"""Names of the LoRA adapters of a model, loaded or not: those of its flags and its state file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from server.host.regular_files import read_regular

_MAX_BYTES = 16 * 1024 * 1024
_MODULES = "--lora-modules"


class AdapterNames:
    """Names of one model's adapters."""

    def __init__(self, flags: Sequence[str], state_file: Path | None) -> None:
        """`flags` are the model's; its process writes the adapters loaded later to `state_file`."""
        self._given = frozenset(_module_names(flags))
        self._state_file = state_file

    def __contains__(self, name: object) -> bool:
        return name in self._given or name in self._stored()

    def _stored(self) -> set[str]:
        """Return the names in the state file; the model's process reports a damaged one."""
        if self._state_file is None:
            return set()
        try:
            content = json.loads(read_regular(self._state_file, _MAX_BYTES))
            return {str(adapter["name"]) for adapter in content["adapters"]}
        except (OSError, ValueError, KeyError, TypeError):
            return set()


def _module_names(flags: Sequence[str]) -> list[str]:
    """Return the names in `--lora-modules`: `name=path` or JSON objects."""
    names: list[str] = []
    inside = False
    for word in flags:
        flag, _, value = word.partition("=")
        if word.startswith("--"):
            inside = flag.replace("_", "-") == _MODULES
            word = value if inside else ""
        if inside and word.startswith("{"):
            names.append(str(json.loads(word).get("name", "")))
        elif inside and "=" in word:
            names.append(word.partition("=")[0])
    return names
