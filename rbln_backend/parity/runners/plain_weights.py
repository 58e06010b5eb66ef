"""Checkpoint weights for transformers: dequantized, with an adapter merged."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from safetensors.torch import load_file, save_file

from rbln_backend.parity.checkpoint_folder import downloaded_folder
from rbln_backend.parity.runners.plain_formats import Tensors, unpacked

_ADAPTED = "base_model.model."
# Fields of adapter_config.json with another sum than scale * B A.
_OTHER_SUMS = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")


@contextmanager
def plain_checkpoint(model: str, lora: str | None) -> Iterator[str]:
    """Yield `model`, or a temporary folder with a plain copy of it.

    A copy is written for packed weights or an adapter. `model` and `lora` are folders or hub names.
    """
    folder = downloaded_folder(model)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    quantization = config.pop("quantization_config", None)
    if quantization is None and lora is None:
        yield model
        return
    weights = unpacked(read_weights(folder), quantization or {})
    if lora is not None:
        add_adapter(weights, downloaded_folder(lora))
    with TemporaryDirectory() as copy:
        for code in folder.glob("*.py"):
            shutil.copy(code, copy)
        (Path(copy) / "config.json").write_text(json.dumps(config), encoding="utf-8")
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
