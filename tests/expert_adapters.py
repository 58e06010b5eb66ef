"""Adapters of stacked experts as PEFT writes them for parameters, and what they add to weights.

A is [experts * r, inputs], expert by expert; B is [outputs, r * experts], its columns going through
the experts for each of the r (PEFT's ``ParamWrapper.get_delta_weight``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "base_model.model."
_A, _B = ".lora_A.weight", ".lora_B.weight"
_FIRST, _SECOND = ("gate_up_proj", "down_proj")


def stack_experts(
    checkpoint: Path, adapter: Path, *, rank: int, strength: float, seed: int, outer: str = _SECOND
) -> Path:
    """Add a pair for each projection of every layer's experts to `adapter`; returns it.

    `outer` is the projection that is called `experts`, the other `experts.base_layer`.
    """
    weights = load_file(checkpoint / "model.safetensors")
    generator = torch.Generator().manual_seed(seed)
    tensors = load_file(adapter / "adapter_model.safetensors")
    for layer, (experts, hidden, inner) in _layers(weights).items():
        for projection, inputs, outputs in ((_FIRST, hidden, 2 * inner), (_SECOND, inner, hidden)):
            name = PREFIX + layer + ("" if projection == outer else ".base_layer")
            a = torch.randn(experts * rank, inputs, generator=generator) * inputs**-0.5
            b = torch.randn(outputs, rank * experts, generator=generator) * strength
            tensors |= {name + _A: a, name + _B: b}
    save_file(tensors, adapter / "adapter_model.safetensors")
    return adapter


def merge_stacks(
    weights: dict[str, Tensor], matrices: Mapping[str, Tensor], scale: float
) -> dict[str, Tensor]:
    """`weights` in float32 with the stacked experts of `matrices` added."""
    for layer, (experts, hidden, inner) in _layers(weights).items():
        for name in (PREFIX + layer, f"{PREFIX}{layer}.base_layer"):
            if name + _A not in matrices:
                continue
            a = matrices[name + _A].double().reshape(experts, -1, matrices[name + _A].shape[1])
            b = matrices[name + _B].double().reshape(len(matrices[name + _B]), -1, experts)
            delta = scale * torch.einsum("ore,eri->eoi", b, a)
            is_first = tuple(delta.shape[1:]) == (2 * inner, hidden)
            weights |= _added(weights, layer, delta, is_first=is_first)
    return weights


def is_stack(name: str) -> bool:
    """Whether a tensor of an adapter is of a stack of experts."""
    return ".experts.lora_" in name or ".experts.base_layer." in name


def _layers(weights: Mapping[str, Tensor]) -> dict[str, tuple[int, int, int]]:
    """By the modules of experts: how many, hidden and intermediate size."""
    found: dict[str, tuple[int, int, int]] = {}
    for name in (name for name in weights if ".experts." in name):
        layer = name[: name.index(".experts.")] + ".experts"
        stack, single = weights.get(f"{layer}.{_SECOND}"), f"{layer}.0.{_SECOND}.weight"
        if stack is not None:
            experts, inner, hidden = stack.shape
            found[layer] = experts, hidden, inner
        elif single in weights:
            count = len({each.split(".")[-3] for each in weights if each.startswith(f"{layer}.")})
            hidden, inner = weights[single].shape
            found[layer] = count, hidden, inner
    return found


def _added(
    weights: Mapping[str, Tensor], layer: str, delta: Tensor, *, is_first: bool
) -> dict[str, Tensor]:
    stacked = f"{layer}.{_FIRST if is_first else _SECOND}"
    if stacked in weights:
        # [experts, inputs, outputs]
        return {stacked: (weights[stacked].double() + delta.transpose(1, 2)).float()}
    made = {}
    for number, change in enumerate(delta):
        parts = ("gate_proj", "up_proj") if is_first else ("down_proj",)
        for part, share in zip(parts, change.chunk(len(parts)), strict=True):
            name = f"{layer}.{number}.{part}.weight"
            made[name] = (weights[name].double() + share).float()
    return made
