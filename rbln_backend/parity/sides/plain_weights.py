"""A checkpoint's weights as transformers multiplies by them: unpacked, and with an adapter added.

Words are unpacked here as the formats' documents say, with none of the engine's code: what reads
them in the engine is on trial.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from rbln_backend.parity.checkpoint_folder import downloaded_folder

Tensors = dict[str, Tensor]

_ADAPTED = "base_model.model."
# Fields of adapter_config.json that would make other sums than scale * B A.
_OTHER_SUMS = ("use_dora", "rank_pattern", "alpha_pattern", "modules_to_save", "fan_in_fan_out")


@contextmanager
def plain_checkpoint(model: str, lora: str | None) -> Iterator[str]:
    """Yield `model`, or the folder of a plain copy of it that is gone afterwards.

    A copy is written where weights are packed or an adapter is to be added; `model` and `lora` are
    folders or names of the hub.
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
    """All tensors of the checkpoint. Raises `ValueError` where it has no safetensors."""
    found: Tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    if not found:
        raise ValueError(f"{folder} holds no *.safetensors")
    return found


def unpacked(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> Tensors:
    """Weights float32 for compressed-tensors' `weight_packed` and GPTQ's `qweight`; the rest as is.

    `quantization` is the `quantization_config` of config.json.
    """
    found: Tensors = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        if kind == "weight_packed":
            found[f"{stem}.weight"] = _compressed(tensors, stem)
        elif kind == "qweight":
            found[f"{stem}.weight"] = _gptq(tensors, stem, quantization)
        elif not _belongs_to_packed(tensors, stem, kind):
            found[name] = tensor
    return found


def add_adapter(tensors: Tensors, folder: Path) -> None:
    """Add a LoRA adapter in PEFT's files to its weights, which become float32.

    Raises `ValueError` for one that is more than scale * B A, or that adapts what is not there.
    """
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


def _belongs_to_packed(tensors: Mapping[str, Tensor], stem: str, kind: str) -> bool:
    if f"{stem}.weight_packed" in tensors:
        return kind in ("weight_scale", "weight_shape")
    return f"{stem}.qweight" in tensors and kind in ("scales", "qzeros", "g_idx")


def _compressed(tensors: Mapping[str, Tensor], stem: str) -> Tensor:
    """Symmetric numbers [N, K], stored plus half of their range, and scales [N, groups]."""
    packed, scales = tensors[f"{stem}.weight_packed"], tensors[f"{stem}.weight_scale"]
    depth = int(tensors[f"{stem}.weight_shape"][1])
    bits = 32 * packed.shape[1] // depth
    numbers = _fields(packed, bits)[:, :depth] - 2 ** (bits - 1)
    by_group = numbers.reshape(len(numbers), scales.shape[1], -1)
    weight: Tensor = by_group * scales.float().unsqueeze(-1)
    return weight.flatten(1)


def _gptq(tensors: Mapping[str, Tensor], stem: str, quantization: Mapping[str, Any]) -> Tensor:
    """Numbers [K, N] packed along K, and scales and zero points [groups, N], of N packed."""
    groups = tensors[f"{stem}.g_idx"].long()
    packed = tensors[f"{stem}.qweight"]
    bits = 32 * packed.shape[0] // len(groups)
    numbers = _fields(packed.t(), bits).t()
    # The first version of the format stores zero points less one.
    less = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
    zeros = _fields(tensors[f"{stem}.qzeros"], bits) + less
    scales = tensors[f"{stem}.scales"].float()
    return ((numbers - zeros[groups]) * scales[groups]).t().contiguous()


def _fields(words: Tensor, bits: int) -> Tensor:
    """The unsigned numbers int64 in words int32 [..., W], the lowest bits first: [..., numbers]."""
    shifts = torch.arange(0, 32, bits)
    found: Tensor = (words.long().unsqueeze(-1) >> shifts) & (2**bits - 1)
    return found.flatten(-2)
