"""Checkpoint weights for transformers, with an adapter merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file
from torch import Tensor

from rbln_backend.parity.checkpoint_folder import downloaded_folder

Tensors = dict[str, Tensor]

_ADAPTED = "base_model.model."
# Fields of adapter_config.json with another sum than scale * B A.
_OTHER_SUMS = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")


@contextmanager
def plain_checkpoint(model: str, lora: str | None) -> Iterator[str]:
    """Yield `model`, or with an adapter a temporary folder with a copy that it is added to.

    `model` and `lora` are folders or hub names. Raises `ValueError` for an adapter of quantised
    weights.
    """
    if lora is None:
        yield model
        return
    folder = downloaded_folder(model)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "quantization_config" in config:
        raise ValueError(f"{model} is quantised: the transformers side adds no adapter to it")
    weights = read_weights(folder)
    add_adapter(weights, downloaded_folder(lora))
    with TemporaryDirectory() as copy:
        for file in (folder / "config.json", *folder.glob("*.py")):
            shutil.copy(file, copy)
        save_file(weights, Path(copy) / "model.safetensors", {"format": "pt"})
        yield copy


def read_weights(folder: Path) -> Tensors:
    """Return all tensors [...] of the checkpoint. Raises `ValueError` without safetensors."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    if not found:
        raise ValueError(f"{folder} holds no *.safetensors")
    return found


def add_adapter(tensors: Tensors, folder: Path) -> None:
    """Add a LoRA adapter in PEFT's files to its weights [N, K], which become float32."""
    config = json.loads((folder / "adapter_config.json").read_text(encoding="utf-8"))
    if others := [field for field in _OTHER_SUMS if config.get(field)]:
        raise ValueError(f"{folder}: {others[0]} is not known to the transformers side")
    rank = config["r"] ** 0.5 if config.get("use_rslora") else config["r"]
    matrices = load_file(folder / "adapter_model.safetensors")
    for name, down in matrices.items():
        module, is_down, _ = name.partition(".lora_A.")
        if not is_down:
            continue
        target = f"{module.removeprefix(_ADAPTED)}.weight"
        if target not in tensors:
            raise ValueError(f"{folder} adapts {target}, which the checkpoint does not have")
        delta = matrices[name.replace(".lora_A.", ".lora_B.")].float() @ down.float()
        tensors[target] = tensors[target].float() + delta * (config["lora_alpha"] / rank)
