"""Schemas and shape functions of the ops in ``torch.ops.rbln_emulator``.

Importing this module defines the ops, whatever implements them later (``build.load_kernels``). All
outputs are fresh and contiguous; inputs may be strided and are never written, but for KV caches
and by the ops whose names end in ``_``. Element types are
float32, bfloat16 and float16 with float32 accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rbln_backend.emulator.packing import packed_shape

NAMESPACE = "rbln_emulator"
_EXPERTS = (
    "Tensor w13, Tensor? w13_bias, Tensor w2, Tensor? w2_bias, int intermediate_size,"
    " str activation) -> Tensor"
)
_QUANTIZED_EXPERTS = (
    "Tensor w13, Tensor w13_scales, Tensor? w13_bias, Tensor w2, Tensor w2_scales,"
    " Tensor? w2_bias, int bits, int intermediate_size, str activation) -> Tensor"
)
SCHEMAS = {
    "pack_linear_weight": "(Tensor weight) -> Tensor",
    # The same where the weight lies, for weights that need no padding (packing.fits_in_place).
    "pack_linear_weight_": "(Tensor(a!) weight) -> ()",
    "linear": "(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor",
    # As linear, over a weight of 4 or 8 bits: quantized_packing says how words and scales lie.
    "quantized_linear": (
        "(Tensor x, Tensor words, Tensor scales, Tensor? bias, int out_features, int bits)"
        " -> Tensor"
    ),
    "rms_norm": "(Tensor x, Tensor weight, float eps) -> Tensor",
    "fused_add_rms_norm": (
        "(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)"
    ),
    "layer_norm": "(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    # function: "silu", "gelu" (of the error function), "gelu_tanh", "quick_gelu" (x times the
    # sigmoid of 1.702 x), "relu2", "sigmoid" or "softplus". gated: that of the first half of a row
    # times the second half.
    "activate": "(Tensor x, str function, bool gated) -> Tensor",
    "rotary_embedding": (
        "(Tensor positions, Tensor q, Tensor k, Tensor cos_sin_cache, int head_size, bool is_neox)"
        " -> (Tensor, Tensor)"
    ),
    # logits [n, V] -> int32 [n, 1]: the first index of each row's largest value; 0 if all are NaN.
    "greedy": "(Tensor logits) -> Tensor",
    # What lies between the linears of an attention layer. q, k and v [T, columns], T = batch *
    # length, may be one tensor: their heads begin at ``*_column``. The norm of each head of q and k
    # and their rotation are left out where they are None. ``starts`` are the seq_idx of causal
    # attention over pages or, with ``ends`` (a cache_offset), the cache_seq_len of windows: see
    # attention/ops.py, also for kv_cache [N, 2, Hkv, 1, S, D]. Returns [T, Hkv * group * D].
    "self_attention": (
        "(Tensor q, int q_column, Tensor k, int k_column, Tensor v, int v_column, Tensor? q_norm,"
        " Tensor? k_norm, float eps, Tensor? positions, Tensor? cos_sin_cache, bool is_neox,"
        " Tensor(a!) kv_cache, Tensor scale, Tensor starts, Tensor? ends, Tensor block_tables,"
        " Tensor? sinks, float? logits_soft_cap, int group, int batch) -> Tensor"
    ),
    # logits [T, E] -> float32 and int32 [T, top_k], the largest first. The weights are those of a
    # softmax over all experts, or (renormalize) over the chosen alone. expert_map int32 [E] renames
    # the chosen, -1 for experts of other ranks; rows of tokens_mask float32 [T, 1] that are 0 are
    # padding and get -1 alone.
    "moe_route": (
        "(Tensor logits, int top_k, bool renormalize, Tensor? expert_map=None,"
        " Tensor? tokens_mask=None) -> (Tensor weights, Tensor ids)"
    ),
    # x [T, H] -> sum over k of weights[t, k] * expert(ids[t, k]). w13 stacks E packed matrices of
    # [2 * intermediate_size, H], w2 of [H, intermediate_size]; a row's ids are distinct, but for
    # -1, which stands for no expert. Experts that nobody chose are not read.
    # activation: "silu" of the first half of w13, or "swigluoai", gate and up alternating.
    "moe": "(Tensor x, Tensor weights, Tensor ids, " + _EXPERTS,
    # The same with weights float32 [T, E]: a row goes to the experts whose weight is not zero.
    # counts int32 [E]: how many rows chose each expert.
    "moe_masked": "(Tensor x, Tensor weights, Tensor counts, " + _EXPERTS,
    # Both over weights of 4 or 8 bits: stacked words and scales, as quantized_linear has them.
    "quantized_moe": "(Tensor x, Tensor weights, Tensor ids, " + _QUANTIZED_EXPERTS,
    "quantized_moe_masked": "(Tensor x, Tensor weights, Tensor counts, " + _QUANTIZED_EXPERTS,
    # y [T, sum of out_features] += the low-rank part of x [T, K], for the adapter of each row.
    # slots int32 [R]: each owns T / R rows; -1 adds nothing. a stacks S packed matrices of
    # [len(b) * rank, K]; each of b, one per slice of y, S packed matrices of [out_features, rank].
    "add_lora_": (
        "(Tensor(a!) y, Tensor x, Tensor slots, Tensor a, Tensor[] b, int rank,"
        " int[] out_features) -> ()"
    ),
}


def _pack_linear_weight(weight: Tensor) -> Tensor:
    out_features, in_features = weight.shape
    return weight.new_empty(packed_shape(weight.dtype, out_features, in_features))


def _pack_linear_weight_in_place(weight: Tensor) -> None:
    """The shape stays; the caller views it as packed."""


def _linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _quantized_linear(
    x: Tensor, words: Tensor, scales: Tensor, bias: Tensor | None, out_features: int, bits: int
) -> Tensor:
    return x.new_empty(*x.shape[:-1], out_features)


def _rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape)


def _fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _layer_norm(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _activate(x: Tensor, function: str, gated: bool) -> Tensor:
    return x.new_empty(*x.shape[:-1], x.shape[-1] // (2 if gated else 1))


def _rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, head_size: int, is_neox: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _greedy(logits: Tensor) -> Tensor:
    return logits.new_empty((logits.shape[0], 1), dtype=torch.int32)


def _self_attention(q: Tensor, *arguments: Any) -> Tensor:
    kv_cache, group = arguments[11], arguments[18]
    return q.new_empty(q.shape[0], kv_cache.shape[2] * group * kv_cache.shape[5])


def _moe_route(logits: Tensor, top_k: int, *_: object) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


def _moe(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


def _add_lora(y: Tensor, *_: object) -> None:
    """The shape stays."""


_FAKES: Mapping[str, Callable[..., Any]] = {
    "pack_linear_weight": _pack_linear_weight,
    "pack_linear_weight_": _pack_linear_weight_in_place,
    "linear": _linear,
    "quantized_linear": _quantized_linear,
    "rms_norm": _rms_norm,
    "fused_add_rms_norm": _fused_add_rms_norm,
    "layer_norm": _layer_norm,
    "activate": _activate,
    "rotary_embedding": _rotary_embedding,
    "greedy": _greedy,
    "self_attention": _self_attention,
    "moe_route": _moe_route,
    "moe": _moe,
    "moe_masked": _moe,
    "quantized_moe": _moe,
    "quantized_moe_masked": _moe,
    "add_lora_": _add_lora,
}


def _define() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{name}", _FAKES[name], lib=library)
    return library


LIBRARY = _define()
