"""Dequantization of checkpoint tensors, by format.

It follows the formats' documents and shares no code with the engine, whose reader is tested by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
_Stored = Mapping[str, Tensor]
_Unpack = Callable[[_Stored, Mapping[str, Any]], Tensor]

_E2M1 = torch.tensor((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0))
# AWQ packs outputs 0 2 4 6 1 3 5 7 into a word: where each is found.
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
_MXFP4 = "_blocks"


def unpacked(tensors: Mapping[str, Tensor], quantization: Mapping[str, Any]) -> Tensors:
    """Return weights [N, K], dequantized to float32 where they are stored in another form."""
    found: Tensors = {}
    modules: dict[str, Tensors] = {}
    for name, tensor in tensors.items():
        stem, _, kind = name.rpartition(".")
        modules.setdefault(stem, {})[kind] = tensor
    for stem, stored in modules.items():
        prefix = f"{stem}." if stem else ""
        made, taken = _plain(stored, quantization)
        rest = {kind: tensor for kind, tensor in stored.items() if kind not in taken}
        found |= {f"{prefix}{kind}": tensor for kind, tensor in (made | rest).items()}
    return found


def _plain(stored: _Stored, quantization: Mapping[str, Any]) -> tuple[Tensors, set[str]]:
    """Return one module's dequantized weight and the names of its stored tensors."""
    blocks = [kind for kind in stored if kind.endswith(_MXFP4)]
    if blocks:
        names = [kind.removesuffix(_MXFP4) for kind in blocks]
        made = {name: _mxfp4(stored[f"{name}_blocks"], stored[f"{name}_scales"]) for name in names}
        return made, {*blocks, *(f"{name}_scales" for name in names)}
    if "weight_scale_2" in stored:
        taken = {"weight", "weight_scale", "weight_scale_2", "input_scale"}
        return {"weight": _nvfp4(stored, quantization)}, taken
    for kind, (unpack, others) in _FORMS.items():
        if kind in stored and (kind != "weight" or stored[kind].dtype in _BYTES):
            return {"weight": unpack(stored, quantization)}, {kind, *others}
    return {}, set()


def _compressed(stored: _Stored, _: Mapping[str, Any]) -> Tensor:
    """Numbers [N, K] plus half of their range, or plus zero points, and scales [N, groups]."""
    packed, scales = stored["weight_packed"], stored["weight_scale"]
    depth = int(stored["weight_shape"][1])
    bits = 32 * packed.shape[1] // depth
    zeros = torch.full(scales.shape, 2 ** (bits - 1))
    if "weight_zero_point" in stored:
        zeros = _fields(stored["weight_zero_point"].t(), bits).t()[: len(scales)]
    by_group = _fields(packed, bits)[:, :depth].reshape(len(packed), scales.shape[1], -1)
    weight: Tensor = (by_group - zeros.unsqueeze(-1)) * scales.float().unsqueeze(-1)
    return weight.flatten(1)


def _columns(stored: _Stored, quantization: Mapping[str, Any]) -> Tensor:
    """``qweight``: AWQ's if nothing orders its groups."""
    if "g_idx" not in stored:
        return _awq(stored)
    return _gptq(stored, quantization)


def _gptq(stored: _Stored, quantization: Mapping[str, Any]) -> Tensor:
    """Numbers [K, N] packed along K, and scales and zero points [groups, N], of N packed."""
    groups = stored["g_idx"].long()
    packed = stored["qweight"]
    bits = 32 * packed.shape[0] // len(groups)
    numbers = _fields(packed.t(), bits).t()
    # The first version of the format stores zero points less one.
    less = 0 if quantization.get("checkpoint_format") == "gptq_v2" else 1
    zeros = _fields(stored["qzeros"], bits) + less
    scales = stored["scales"].float()
    return ((numbers - zeros[groups]) * scales[groups]).t().contiguous()


def _awq(stored: _Stored) -> Tensor:
    """Numbers [K, N] and zero points [groups, N], both packed along N in an order of their own."""
    numbers, zeros = (
        _fields(stored[name], 4).unflatten(1, (-1, 8))[..., _AWQ_PLACES].flatten(1)
        for name in ("qweight", "qzeros")
    )
    scales = stored["scales"].float()
    groups = torch.arange(len(numbers)) // (len(numbers) // len(scales))
    weight: Tensor = (numbers - zeros[groups]) * scales[groups]
    return weight.t().contiguous()


def _nibble_blocks(stored: _Stored, _: Mapping[str, Any]) -> Tensor:
    """Numbers [N, K] from 0 to 15, even ones in their words' lower halves: see ``_scaled``."""
    in_order = _fields(stored["blocks4"], 4).unflatten(1, (-1, 2, 4)).transpose(2, 3).flatten(1)
    return _scaled(in_order if "minima" in stored else in_order - 8, stored)


def _byte_blocks(stored: _Stored, _: Mapping[str, Any]) -> Tensor:
    """Signed bytes [N, K]: see ``_scaled``."""
    return _scaled(stored["blocks8"].view(torch.int8), stored)


def _scaled(numbers: Tensor, stored: _Stored) -> Tensor:
    """Times scales [N, groups], plus minima where there are some."""
    scales = stored["scales"].float().unsqueeze(-1)
    weight: Tensor = numbers.unflatten(1, (scales.shape[1], -1)) * scales
    if "minima" in stored:
        weight = weight + stored["minima"].float().unsqueeze(-1)
    return weight.flatten(1)


def _bytes(stored: _Stored, quantization: Mapping[str, Any]) -> Tensor:
    """Numbers [N, K] and one scale, one per row, or one per block."""
    weight = stored["weight"].float()
    scales = next(stored[name] for name in _BYTE_SCALES if name in stored).float()
    if scales.dim() < 2 or scales.shape == (len(weight), 1):
        return weight * scales
    rows, inputs = _block(quantization)
    spread = scales.repeat_interleave(rows, 0).repeat_interleave(inputs, 1)
    return weight * spread[: weight.shape[0], : weight.shape[1]]


def _block(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and inputs of a block; raises ``ValueError`` where the checkpoint names none."""
    groups = dict(quantization.get("config_groups") or {}).values()
    named = [group["weights"].get("block_structure") for group in groups]
    for block in (quantization.get("weight_block_size"), *named):
        if block:
            return int(block[0]), int(block[1])
    raise ValueError("scales by block, and quantization_config names no blocks")


def _mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Pairs [E, N, K / 32, 16] and exponents [E, N, K / 32] to [E, K, N] of transformers."""
    codes = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(3).long()
    sizes = _E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    weight = sizes * 2.0 ** (scales.float() - 127).unsqueeze(-1)
    return weight.flatten(2).transpose(1, 2).contiguous()


def _nvfp4(stored: _Stored, _: Mapping[str, Any]) -> Tensor:
    """Pairs uint8 [N, K / 2], scales e4m3 [N, groups] and one for all, to [N, K]."""
    codes = torch.stack((stored["weight"] & 15, stored["weight"] >> 4), dim=-1).flatten(1).long()
    sizes = _E2M1[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    scales = stored["weight_scale"].float() * stored["weight_scale_2"].float()
    weight: Tensor = sizes.unflatten(1, (scales.shape[1], -1)) * scales.unsqueeze(-1)
    return weight.flatten(1)


def _fields(words: Tensor, bits: int) -> Tensor:
    """The unsigned numbers int64 in words int32 [..., W], the lowest bits first: [..., numbers]."""
    shifts = torch.arange(0, 32, bits)
    found: Tensor = (words.long().unsqueeze(-1) >> shifts) & (2**bits - 1)
    return found.flatten(-2)


_BYTES = (torch.float8_e4m3fn, torch.int8)
_BYTE_SCALES = ("weight_scale_inv", "weight_scale")
# Functions by the tensor that identifies a form, with the names of its other tensors.
_FORMS: Mapping[str, tuple[_Unpack, tuple[str, ...]]] = {
    "weight_packed": (_compressed, ("weight_scale", "weight_shape", "weight_zero_point")),
    "qweight": (_columns, ("scales", "qzeros", "g_idx")),
    "blocks4": (_nibble_blocks, ("scales", "minima")),
    "blocks8": (_byte_blocks, ("scales", "minima")),
    "weight": (_bytes, (*_BYTE_SCALES, "input_scale", "input_zero_point")),
}
