"""The short model names of the documented parity runner, and what a model's config.json says."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HUB_NAMES = {
    "llama3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen1.5-moe-15b": "Qwen/Qwen1.5-MoE-A2.7B",
    "qwen3-moe-30b": "Qwen/Qwen3-30B-A3B",
    "qwen3-moe-235b": "Qwen/Qwen3-235B-A22B",
    "deepseek-v2": "deepseek-ai/DeepSeek-V2-Lite",
    "llama4-maverick": "meta-llama/Llama-4-Maverick-17B-128E",
}

_EXPERT_FIELDS = ("num_experts", "num_local_experts", "n_routed_experts")


def resolve_name(name: str) -> str:
    """A short name becomes the hub's; a path or any other name stays as it is."""
    return HUB_NAMES.get(name, name)


def read_config(model: str) -> Mapping[str, Any]:
    """Return the text part of a local checkpoint's config.json; empty for a name of the hub."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return {}
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    text: dict[str, Any] = config.get("text_config") or {}
    return config | text


def has_experts(config: Mapping[str, Any]) -> bool:
    """Whether the model is a mixture of experts."""
    return any(int(config.get(name) or 0) > 1 for name in _EXPERT_FIELDS)
