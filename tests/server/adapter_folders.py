"""Writes small LoRA adapters as PEFT does, for a model or for the layers of a scripted one."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from rbln_backend.lora.adapter_files import Target

TARGETS: Mapping[str, Target] = {
    f"model.layers.{layer}.{module}": shape
    for layer in range(2)
    for module, shape in {
        "self_attn.q_proj": Target.linear(16, 16),
        "self_attn.v_proj": Target.linear(16, 8),
        "mlp.down_proj": Target.linear(32, 16),
    }.items()
}
MODULES = ("q_proj", "v_proj")
PREFIX = "base_model.model."


def adapter_tensors(
    targets: Mapping[str, Target], modules: Sequence[str], rank: int, seed: int, scale: float
) -> dict[str, np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    tensors = {}
    for path, shape in targets.items():
        if path.rpartition(".")[2] in modules:
            name = f"{PREFIX}{path}"
            pair = shape.pairs(rank)[0]
            tensors[f"{name}.lora_A.weight"] = rng.normal(0, scale, pair.a)
            tensors[f"{name}.lora_B.weight"] = rng.normal(0, scale, pair.b)
    return {name: tensor.astype(np.float32) for name, tensor in tensors.items()}


def write_adapter(
    folder: Path,
    *,
    rank: int = 4,
    targets: Mapping[str, Target] = TARGETS,
    modules: Sequence[str] = MODULES,
    seed: int = 0,
    scale: float = 0.3,
    config: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:
    """Write a PEFT folder; `config` and `tensors` replace entries, None takes one away."""
    folder.mkdir(parents=True, exist_ok=True)
    written: dict[str, Any] = {
        "peft_type": "LORA",
        "base_model_name_or_path": "owner/Tiny",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": list(modules),
        "bias": "none",
        "task_type": "CAUSAL_LM",
        "modules_to_save": None,
        "use_dora": False,
        **(config or {}),
    }
    kept = {name: value for name, value in written.items() if value is not ...}
    (folder / "adapter_config.json").write_text(json.dumps(kept))
    every = {**adapter_tensors(targets, modules, rank, seed, scale), **(tensors or {})}
    save_file(
        {name: tensor for name, tensor in every.items() if tensor is not None},
        folder / "adapter_model.safetensors",
    )
    return folder
