"""Compiled binaries: one for each graph, on disk or in this process's mega cache."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rebel.core.inputs import Input
from rebel.device_info import target_name
from rebel.rules import require

# What makes another binary of the same graph.
_OPTIONS = ("num_devices", "dtype", "process_group_dict", "mode", "use_static_output")
_MODES_THAT_COMPILE_ALIKE = "compile_only"

# Binaries of this process: what it compiled, or read from a bundle.
IN_MEMORY: dict[str, bytes] = {}


def get_key(code: str, inputs: Sequence[Input], options: Mapping[str, Any]) -> str:
    """A name for the binary of this graph for this NPU; a host without one makes the same."""
    chosen = {key: options[key] for key in _OPTIONS if key in options}
    chosen["mode"] = [mode for mode in options.get("mode", ()) if mode != _MODES_THAT_COMPILE_ALIKE]
    described = [{**given.describe(), "device": None} for given in inputs]
    text = json.dumps([code, described, chosen, target_name()], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def find(key: str, options: Mapping[str, Any]) -> bool:
    """Return True if a binary exists; rule ``cache`` checks its owner."""
    binary = IN_MEMORY.get(key)
    if binary is None and (path := _path(key, options)) is not None and path.is_file():
        binary = path.read_bytes()
    if binary is None:
        return False
    IN_MEMORY[key] = binary
    owner = json.loads(binary)["rank"]
    require("cache", owner == _rank(), f"binary {key} is rank {owner}'s, this is rank {_rank()}")
    return True


def store(key: str, options: Mapping[str, Any]) -> None:
    """Keep a new binary; with ``mega_cache_only`` no file of its own is written."""
    binary = json.dumps({"binary": key, "npu": target_name(), "rank": _rank()}).encode()
    if "cache_dir" in options:
        IN_MEMORY[key] = binary
    path = _path(key, options)
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(binary)


def _path(key: str, options: Mapping[str, Any]) -> Path | None:
    if "cache_dir" not in options or options.get("mega_cache_only"):
        return None
    return Path(options["cache_dir"]) / f"{key}.rbln"


def _rank() -> str:
    return os.environ.get("LOCAL_RANK", "0")
