"""Writes checkpoints with weights of 4 or 8 bits, and beside each what it stands for.

The words are packed here as the formats' documents say, with no code of the engine's. Scales are
bfloat16 numbers, so that an engine of any dtype multiplies by the same weights.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.checkpoints import make_checkpoint

CHANNEL = -1
_PROJECTION = re.compile(r"(_proj|experts\.\d+\.w[123])\.weight$")
_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How the weights of a checkpoint are quantised."""

    format: Literal["compressed-tensors", "gptq"] = "compressed-tensors"
    bits: int = 4
    group_size: int = 64
    head_bits: int | None = None
    """Of the LM head, one scale per channel; None leaves it alone."""
    fields: dict[str, Any] = field(default_factory=dict)
    """Fields of ``quantization_config`` that are something else than what is written."""


def make_quantized_checkpoint(
    arch: str, path: Path, recipe: Recipe, *, seed: int = 0, **config_overrides: Any
) -> Path:
    """Write the checkpoint into ``path`` and a float32 one of the same values into its "plain".

    Returns ``path``.
    """
    plain = make_checkpoint(arch, path / "plain", seed=seed, **config_overrides)
    (file,) = plain.glob("*.safetensors")
    tensors, quantized = load_file(file), {}
    for name in sorted(tensors):
        bits, group = recipe.bits, recipe.group_size
        if name == _HEAD and recipe.head_bits is not None:
            bits, group = recipe.head_bits, CHANNEL
        elif not _PROJECTION.search(name):
            quantized[name] = tensors[name]
            continue
        numbers, scales = quantize(tensors[name], bits, group)
        tensors[name] = dequantize(numbers, scales)
        pack = _compressed if recipe.format == "compressed-tensors" else _gptq
        stem = name.removesuffix("weight")
        quantized |= {stem + key: value for key, value in pack(numbers, scales, bits).items()}
    save_file(tensors, file, {"format": "pt"})
    save_file(quantized, path / "model.safetensors", {"format": "pt"})
    for other in plain.iterdir():
        if other.suffix != ".safetensors":
            (path / other.name).write_bytes(other.read_bytes())
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantization_config(recipe) | recipe.fields
    (path / "config.json").write_text(json.dumps(config))
    return path


def quantize(weight: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor]:
    """The nearest integers [N, K], and the scales [N, groups]; K must consist of whole groups."""
    by_group = weight.unflatten(1, (1, -1) if group == CHANNEL else (-1, group))
    most = 2 ** (bits - 1) - 1
    scales = (by_group.abs().amax(-1) / most).bfloat16().float()
    numbers = (by_group / scales.unsqueeze(-1)).round().clamp(-most - 1, most)
    return numbers.flatten(1).to(torch.int64), scales


def dequantize(numbers: Tensor, scales: Tensor) -> Tensor:
    return (numbers.unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(-1)).flatten(1)


def pack(fields: Tensor, bits: int) -> Tensor:
    """Unsigned numbers [..., K] as words int32 [..., K * bits / 32], the first number lowest."""
    places = torch.arange(0, 32, bits)
    words = (fields.unflatten(-1, (-1, 32 // bits)) << places).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _compressed(numbers: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    return {
        "weight_packed": pack(numbers + 2 ** (bits - 1), bits),
        "weight_scale": scales,
        "weight_shape": torch.tensor(numbers.shape),
    }


def _gptq(numbers: Tensor, scales: Tensor, bits: int) -> dict[str, Tensor]:
    columns, depth = numbers.shape
    groups = scales.shape[1]
    # The first version of the format stores zero points less one.
    zeros = torch.full((groups, columns), 2 ** (bits - 1) - 1)
    return {
        "qweight": pack(numbers + 2 ** (bits - 1), bits).t().contiguous(),
        "scales": scales.t().contiguous(),
        "qzeros": pack(zeros, bits),
        "g_idx": (torch.arange(depth) // (depth // groups)).int(),
    }


def quantization_config(recipe: Recipe) -> dict[str, Any]:
    """What config.json says of such a checkpoint."""
    if recipe.format == "gptq":
        return {
            "quant_method": "gptq",
            "bits": recipe.bits,
            "group_size": recipe.group_size,
            "desc_act": False,
            "sym": True,
            "lm_head": recipe.head_bits is not None,
        }
    groups = {"group_0": _group(["Linear"], recipe.bits, recipe.group_size)}
    if recipe.head_bits is not None:
        groups["group_1"] = _group(["re:.*lm_head"], recipe.head_bits, CHANNEL)
    kept = ["re:.*mlp.gate$", "re:.*block_sparse_moe.gate$", "re:.*shared_expert_gate$"]
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
        "ignore": kept if recipe.head_bits is not None else ["lm_head", *kept],
    }


def _group(targets: list[str], bits: int, group_size: int) -> dict[str, Any]:
    per_channel = group_size == CHANNEL
    return {
        "targets": targets,
        "weights": {
            "num_bits": bits,
            "type": "int",
            "symmetric": True,
            "strategy": "channel" if per_channel else "group",
            "group_size": None if per_channel else group_size,
            "actorder": None,
            "dynamic": False,
        },
        "input_activations": None,
        "output_activations": None,
    }
