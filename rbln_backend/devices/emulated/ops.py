"""The ops in ``torch.ops.rbln_emulator``: each one's schema, and the function that tells shapes.

Importing this module defines the ops, whatever implements them later (``kernel_set.load_kernels``).
All outputs are fresh and contiguous; inputs may be strided and are never written, but for KV caches
and by the ops whose names end in ``_``. Element types are float32, bfloat16 and float16 with
float32 accumulation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from rbln_backend.devices.emulated.packing import packed_shape

NAMESPACE = "rbln_emulator"
LIBRARY = torch.library.Library(NAMESPACE, "DEF")

_ADAPTERS = (
    " Tensor? slots=None, Tensor? a13=None, Tensor? b1=None, Tensor? b3=None, Tensor? a2=None,"
    " Tensor? b2=None, int rank=0) -> Tensor"
)
_EXPERTS = (
    "Tensor w13, Tensor? w13_bias, Tensor w2, Tensor? w2_bias, int intermediate_size,"
    " str activation," + _ADAPTERS
)
_QUANTIZED_EXPERTS = (
    "Tensor w13, Tensor w13_scales, Tensor? w13_zeros, Tensor? w13_bias, str w13_format, Tensor w2,"
    " Tensor w2_scales, Tensor? w2_zeros, Tensor? w2_bias, str w2_format, int intermediate_size,"
    " str activation," + _ADAPTERS
)
_Shapes = TypeVar("_Shapes", bound=Callable[..., Any])


def _op(schema: str) -> Callable[[_Shapes], _Shapes]:
    """Defines the op of ``schema`` that is named as the decorated function, which tells shapes."""

    def define(shapes: _Shapes) -> _Shapes:
        name = shapes.__name__
        LIBRARY.define(name + schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.register_fake(f"{NAMESPACE}::{name}", shapes, lib=LIBRARY)
        return shapes

    return define


@_op("(Tensor weight) -> Tensor")
def pack_linear_weight(weight: Tensor) -> Tensor:
    """weight [N, K] to packed panels; see ``packing.packed_shape``."""
    out_features, in_features = weight.shape
    return weight.new_empty(packed_shape(weight.dtype, out_features, in_features))


@_op("(Tensor(a!) weight) -> ()")
def pack_linear_weight_(weight: Tensor) -> None:
    """Pack weight [N, K] in place, if it needs no padding (``packing.fits_in_place``).

    The shape stays; the caller views it as packed.
    """


@_op("(Tensor x, Tensor packed, Tensor? bias, int out_features) -> Tensor")
def linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    """x [..., K], packed [N, K], bias [N] to [..., N]."""
    return x.new_empty(*x.shape[:-1], out_features)


@_op("(Tensor x, Tensor packed, int out_features) -> Tensor")
def linear_heads(x: Tensor, packed: Tensor, out_features: int) -> Tensor:
    """x [T, H, K], each head times a packed [out_features, K] of its own."""
    return x.new_empty(*x.shape[:2], out_features)


@_op(
    "(Tensor x, Tensor words, Tensor scales, Tensor? zeros, Tensor? bias, int out_features,"
    " str format) -> Tensor"
)
def quantized_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    *_: object,
) -> Tensor:
    """As ``linear``, x [..., K] to [..., N], over a weight of 4 or 8 bits.

    ``packing`` describes the layout of its parts.
    """
    return x.new_empty(*x.shape[:-1], out_features)


@_op("(Tensor x, Tensor weight, float eps) -> Tensor")
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., K], weight [K] to [..., K]."""
    return x.new_empty(x.shape)


@_op("(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)")
def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """x and residual [..., K], weight [K] to the norm of the sum and the sum, both [..., K]."""
    return x.new_empty(x.shape), x.new_empty(x.shape)


@_op("(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor")
def layer_norm(x: Tensor, *_: object) -> Tensor:
    """x [..., K], weight and bias [K] to [..., K]."""
    return x.new_empty(x.shape)


@_op("(Tensor x, str function, bool gated) -> Tensor")
def activate(x: Tensor, function: str, gated: bool) -> Tensor:
    """x [..., I], or [..., 2 * I] if gated, to [..., I].

    function: "silu", "gelu" (exact), "gelu_tanh", "quick_gelu" (x times the sigmoid of 1.702 x),
    "relu2", "sigmoid" or "softplus". gated: the function of the first half of a row times the
    second half.
    """
    return x.new_empty(*x.shape[:-1], x.shape[-1] // (2 if gated else 1))


@_op(
    "(Tensor positions, Tensor q, Tensor k, Tensor cos_sin_cache, int head_size, bool is_neox)"
    " -> (Tensor, Tensor)"
)
def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, head_size: int, is_neox: bool
) -> tuple[Tensor, Tensor]:
    """positions int64 [T], q and k [T, columns], cos_sin_cache [P, rotated] to rotated q and k."""
    return q.new_empty(q.shape), k.new_empty(k.shape)


@_op("(Tensor x, Tensor numbers) -> Tensor")
def take_rows(x: Tensor, numbers: Tensor) -> Tensor:
    """x [N, K] and numbers int64 [...] to the rows of these numbers [..., K]."""
    return x.new_empty(*numbers.shape, x.shape[1])


@_op("(Tensor logits) -> Tensor")
def greedy(logits: Tensor) -> Tensor:
    """logits [n, V] to int32 [n, 1]: first index of each row's largest value; 0 if all are NaN."""
    return logits.new_empty((logits.shape[0], 1), dtype=torch.int32)


@_op(
    "(Tensor logits, Tensor temperature, Tensor? top_k, Tensor? top_p, Tensor? min_p,"
    " Tensor randoms) -> Tensor"
)
def sample(logits: Tensor, *_arguments: Any) -> Tensor:
    """logits [n, V] to int32 [n, 1]: a token of each row, drawn as vLLM's sampler would.

    temperature, top_p and min_p are float32 [n], top_k int32 [n]; randoms int64 [n] has 64 random
    bits for each row, which with the row alone decide its token. A temperature below 1e-5 takes
    the first of the largest logits.
    """
    return logits.new_empty((logits.shape[0], 1), dtype=torch.int32)


@_op(
    "(Tensor(a!) logits, Tensor prompts, Tensor outputs, Tensor output_ends, Tensor presence,"
    " Tensor frequency, Tensor repetition) -> ()"
)
def penalize_(*_arguments: Any) -> None:
    """Apply vLLM's penalties to float32 logits [n, V] in place, where a row has had a token.

    prompts int64 [n, P], padded with what is no token; outputs int32 of all rows, one after
    another, which end at output_ends int64 [n]; presence, frequency and repetition float32 [n].
    """


@_op("(Tensor logits, Tensor tokens, int count, bool is_normalized) -> (Tensor, Tensor, Tensor)")
def top_logprobs(
    logits: Tensor, _tokens: Tensor, count: int, *_arguments: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """logits [n, V] and tokens int32 [n] to the log-probabilities of these and the likeliest.

    Returns int32 IDs and float32 values [n, 1 + count], the row's token first and the first of
    equal ones earlier, and int64 [n]: how many tokens are no less likely than the row's. Without
    ``is_normalized`` the values are logits.
    """
    shape = (logits.shape[0], 1 + count)
    return (
        logits.new_empty(shape, dtype=torch.int32),
        logits.new_empty(shape, dtype=torch.float32),
        logits.new_empty(shape[:1], dtype=torch.int64),
    )


@_op(
    "(Tensor q, int q_column, Tensor k, int k_column, Tensor v, int v_column, Tensor? q_norm,"
    " Tensor? k_norm, float eps, Tensor? positions, Tensor? cos_sin_cache, bool is_neox,"
    " Tensor(a!) kv_cache, Tensor scale, Tensor starts, Tensor? ends, Tensor block_tables,"
    " Tensor? sinks, float? logits_soft_cap, Tensor? alibi_slopes, Tensor? k_scale,"
    " Tensor? v_scale, int? attention_chunk, int? attention_window, int group, int batch,"
    " Tensor? query_counts=None) -> Tensor"
)
def self_attention(q: Tensor, *arguments: Any) -> Tensor:
    """Per-head norms, rotation, cache write and attention, between an attention layer's linears.

    q, k and v [T, columns], T = batch * length, may be one tensor: their heads begin at
    ``*_column``. None for norm weights or cosines omits that step. ``starts`` are the seq_idx of
    causal attention over pages or, with ``ends`` (a cache_offset), the cache_seq_len of windows:
    see layers/attention_ops.py, also for kv_cache [N, 2, Hkv, 1, S, D] and arguments after sinks.
    Returns [T, Hkv * group * D].
    """
    kv_cache, group = arguments[11], arguments[23]
    return q.new_empty(q.shape[0], kv_cache.shape[2] * group * kv_cache.shape[5])


@_op(
    "(Tensor q, Tensor kv_cache, Tensor scale, Tensor seq_idx, Tensor block_tables,"
    " Tensor? sinks=None, float? logits_soft_cap=None, Tensor? alibi_slopes=None,"
    " Tensor? k_scale=None, Tensor? v_scale=None, int? attention_chunk=None,"
    " int? attention_window=None, Tensor? query_counts=None) -> Tensor"
)
def shared_attention(q: Tensor, *_: object, **__: object) -> Tensor:
    """As the causal ops, over keys and values that another op has written for all tokens.

    q [B, Hkv, G, L, D]; returns its shape, in the layout of the causal ops.
    """
    batch, kv_heads, group, length, size = q.shape
    return q.new_empty(batch, length, kv_heads, group, size).permute(0, 2, 3, 1, 4)


@_op(
    "(Tensor q, Tensor kv_c, Tensor k_pe, Tensor(a!) kv_cache, Tensor scale, Tensor seq_idx,"
    " Tensor block_tables, int batch, Tensor? query_counts=None) -> Tensor"
)
def latent_attention(q: Tensor, kv_c: Tensor, *_: object) -> Tensor:
    """Causal attention of H heads over one compressed head.

    q [T, H, C + R], kv_c [T, C], k_pe [T, R], T = batch * length, kv_cache [N, 1, 1, 1, S, C + R].
    A row of the cache is kv_c and k_pe, the key of all heads, of which the first C numbers are the
    value too. Returns [T, H, C].
    """
    return q.new_empty(q.shape[0], q.shape[1], kv_c.shape[1])


@_op(
    "(Tensor logits, int top_k, bool renormalize, Tensor? expert_map=None,"
    " Tensor? tokens_mask=None) -> (Tensor weights, Tensor ids)"
)
def moe_route(logits: Tensor, top_k: int, *_: object) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> float32 and int32 [T, top_k], the largest first.

    The weights are those of a softmax over all experts, or (renormalize) over the chosen alone.
    expert_map int32 [E] renames the chosen, -1 for experts of other ranks; rows of tokens_mask
    float32 [T, 1] that are 0 are padding and get -1 alone.
    """
    shape = (logits.shape[0], top_k)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int32)


@_op("(Tensor x, Tensor weights, Tensor ids, " + _EXPERTS)
def moe(x: Tensor, *_: object) -> Tensor:
    """x [T, H] -> sum over k of weights[t, k] * expert(ids[t, k]).

    w13 stacks E packed matrices of [2 * intermediate_size, H], w2 of [H, intermediate_size]; a
    row's ids are distinct, but for -1, which stands for no expert. Experts that no row chose are
    not read. activation: "silu" of the first half of w13, or "swigluoai", gate and up alternating.
    slots int32 [R] names the adapter of T / R rows each, -1 for none: a row's products then get
    its low-rank part (see ``add_lora_``), of a13 [E, S, ...], packed [slices * rank, H]; b1 and
    b3, packed [intermediate_size, rank], or b1 alone, for gate and up alternating, of twice the
    outputs; a2 of [rank, intermediate_size], b2 of [H, rank].
    """
    return x.new_empty(x.shape)


@_op("(Tensor x, Tensor weights, Tensor counts, " + _EXPERTS)
def moe_masked(x: Tensor, *_: object) -> Tensor:
    """As ``moe``, x [T, H] to [T, H], with weights float32 [T, E].

    A row goes to the experts whose weight is not zero. counts int32 [E]: rows that chose each
    expert.
    """
    return x.new_empty(x.shape)


@_op("(Tensor x, Tensor weights, Tensor ids, " + _QUANTIZED_EXPERTS)
def quantized_moe(x: Tensor, *_: object) -> Tensor:
    """As ``moe``, x [T, H] to [T, H], over weights of 4 or 8 bits.

    Their parts are stacked by expert, each as ``quantized_linear`` takes it.
    """
    return x.new_empty(x.shape)


@_op("(Tensor x, Tensor weights, Tensor counts, " + _QUANTIZED_EXPERTS)
def quantized_moe_masked(x: Tensor, *_: object) -> Tensor:
    """As ``moe_masked``, x [T, H] to [T, H], over weights as of ``quantized_moe``."""
    return x.new_empty(x.shape)


@_op(
    "(Tensor(a!) y, Tensor x, Tensor slots, Tensor a, Tensor[] b, int rank, int[] out_features)"
    " -> ()"
)
def add_lora_(y: Tensor, *_: object) -> None:
    """y [T, sum of out_features] += the low-rank part of x [T, K], for the adapter of each row.

    slots int32 [R]: each owns T / R rows; -1 adds nothing. a stacks S packed matrices of [len(b) *
    rank, K]; each of b, one per slice of y, S packed matrices of [out_features, rank].
    """
