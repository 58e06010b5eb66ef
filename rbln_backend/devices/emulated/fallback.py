"""PyTorch bodies of every kernel op, for hosts where the C++ library cannot be built or loaded.

``ops`` has their shapes. They compute the same values to rounding, but ATen's own kernels decide
the summation order, so results may depend on the batch size. ``linear`` unpacks its weight at every
call: a compiler that knows it runs on these bodies leaves linears alone instead of packing them.
``moe`` takes plain matrices here, too.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rbln_backend.devices.emulated import fallback_attention, ops
from rbln_backend.devices.emulated.packing import dequantize, pack_reference, unpack

# SwiGLU as gpt-oss has it.
SWIGLU_ALPHA = 1.702
SWIGLU_LIMIT = 7.0


def _silu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate) * up


def _swigluoai(gate_up: Tensor) -> Tensor:
    gate = gate_up[..., ::2].clamp(max=SWIGLU_LIMIT)
    up = gate_up[..., 1::2].clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * torch.sigmoid(gate * SWIGLU_ALPHA) * (up + 1)


_EXPERT_ACTIVATIONS = {"silu": _silu, "swigluoai": _swigluoai}


def moe_route(
    logits: Tensor,
    top_k: int,
    renormalize: bool,
    expert_map: Tensor | None = None,
    tokens_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    scores = logits.float()
    if renormalize:
        best, ids = scores.topk(top_k, dim=-1)
        weights = best.softmax(dim=-1)
    else:
        weights, ids = scores.softmax(dim=-1).topk(top_k, dim=-1)
    ids = ids.int() if expert_map is None else expert_map[ids]
    if tokens_mask is not None:
        ids = ids.masked_fill(tokens_mask.view(-1, 1) == 0, -1)
    return weights, ids


def add_lora_(
    y: Tensor,
    x: Tensor,
    slots: Tensor,
    a: Tensor,
    b: list[Tensor],
    rank: int,
    out_features: list[int],
) -> None:
    of_row = slots.repeat_interleave(x.shape[0] // slots.numel())
    for slot in set(slots.tolist()) - {-1}:
        rows = (of_row == slot).nonzero().flatten()
        down = unpack(a[slot], rank * len(b), x.shape[-1])
        hidden = functional.linear(x[rows], down).split(rank, dim=-1)
        parts = zip(hidden, b, out_features, strict=True)
        delta = [functional.linear(h, unpack(stack[slot], n, rank)) for h, stack, n in parts]
        y[rows] += torch.cat(delta, dim=-1)


class _Adapters(NamedTuple):
    """Adapter arguments of the expert ops; see ``ops``."""

    slots: Tensor | None = None
    a13: Tensor | None = None
    b1: Tensor | None = None
    b3: Tensor | None = None
    a2: Tensor | None = None
    b2: Tensor | None = None
    rank: int = 0


def _add_adapters(
    adapters: _Adapters,
    y: Tensor,
    x: Tensor,
    rows: Tensor,
    tokens: int,
    expert: int,
    a: Tensor | None,
    *stacks: Tensor | None,
) -> None:
    """Add the low-rank part of x [n, K] to an expert's products y of ``rows`` [n] of ``tokens``."""
    if adapters.slots is not None and a is not None:
        slots = adapters.slots[rows // (tokens // adapters.slots.numel())]
        b = [stack[expert] for stack in stacks if stack is not None]
        add_lora_(y, x, slots, a[expert], b, adapters.rank, [y.shape[-1] // len(b)] * len(b))


def moe(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    w13_bias: Tensor | None,
    w2: Tensor,
    w2_bias: Tensor | None,
    intermediate_size: int,
    activation: str,
    *adapters: Any,
) -> Tensor:
    """x [T, H], weights and ids [T, k] to [T, H]: loops over the chosen experts."""
    adapted = _Adapters(*adapters)
    first_parts, second_parts = adapted[1:4], adapted[4:6]
    total = x.new_zeros(x.shape, dtype=torch.float32)
    hidden_size = x.shape[-1]
    for expert in ids[ids >= 0].unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        first = _matrix(w13[expert], 2 * intermediate_size, hidden_size)
        second = _matrix(w2[expert], hidden_size, intermediate_size)
        gate_up = functional.linear(x[rows], first, _row(w13_bias, expert))
        _add_adapters(adapted, gate_up, x[rows], rows, len(x), expert, *first_parts)
        hidden = _EXPERT_ACTIVATIONS[activation](gate_up.float()).to(x.dtype)
        out = functional.linear(hidden, second, _row(w2_bias, expert))
        _add_adapters(adapted, out, hidden, rows, len(x), expert, *second_parts)
        total.index_add_(0, rows, out.float() * weights[rows, slots, None])
    return total.to(x.dtype)


def moe_masked(x: Tensor, weights: Tensor, counts: Tensor, *experts: Any) -> Tensor:
    return moe(x, weights, _chosen_ids(weights, counts), *experts)


def quantized_moe(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    w13: Tensor,
    w13_scales: Tensor,
    w13_zeros: Tensor | None,
    w13_bias: Tensor | None,
    w13_format: str,
    w2: Tensor,
    w2_scales: Tensor,
    w2_zeros: Tensor | None,
    w2_bias: Tensor | None,
    w2_format: str,
    intermediate_size: int,
    activation: str,
    *adapters: Any,
) -> Tensor:
    first = (w13, w13_scales, w13_zeros, 2 * intermediate_size, w13_format)
    second = (w2, w2_scales, w2_zeros, x.shape[-1], w2_format)
    chosen = ids[ids >= 0].unique()
    plain = []
    for words, scales, zeros, width, written in (first, second):
        made = [
            dequantize(words[e], scales[e], None if zeros is None else zeros[e], width, written)
            for e in chosen.tolist()
        ]
        plain.append(torch.stack(made).to(x.dtype) if made else words.new_empty(0, dtype=x.dtype))
    numbers = torch.full((w13.shape[0] + 1,), -1, dtype=torch.int32)
    numbers[chosen] = torch.arange(len(chosen), dtype=torch.int32)
    biases = [None if bias is None else bias[chosen] for bias in (w13_bias, w2_bias)]
    experts = (plain[0], biases[0], plain[1], biases[1])
    adapted = _Adapters(*adapters)
    stacks = [None if stack is None else stack[chosen] for stack in adapted[1:-1]]
    rest: tuple[Any, ...] = (intermediate_size, activation, adapted.slots, *stacks, adapted.rank)
    return moe(x, weights, numbers[ids], *experts, *rest)


def quantized_moe_masked(x: Tensor, weights: Tensor, counts: Tensor, *experts: Any) -> Tensor:
    return quantized_moe(x, weights, _chosen_ids(weights, counts), *experts)


def _chosen_ids(weights: Tensor, counts: Tensor) -> Tensor:
    numbers = torch.arange(weights.shape[1], dtype=torch.int32)
    return torch.where((weights != 0) & (counts > 0), numbers, -1)


def _matrix(weight: Tensor, out_features: int, in_features: int) -> Tensor:
    return weight if weight.dim() == 2 else unpack(weight, out_features, in_features)


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]


# Of the draw's weights, as in kernels/sampling/.
_UNITS = 2.0**30
_GREEDY_TEMPERATURE = 1e-5
_MAGIC = 12582912.0


def pack_linear_weight(weight: Tensor) -> Tensor:
    return pack_reference(weight)


def pack_linear_weight_(weight: Tensor) -> None:
    weight.copy_(pack_reference(weight).view(weight.shape))


def linear(x: Tensor, packed: Tensor, bias: Tensor | None, out_features: int) -> Tensor:
    return functional.linear(x, unpack(packed, out_features, x.shape[-1]), bias).contiguous()


def linear_heads(x: Tensor, packed: Tensor, out_features: int) -> Tensor:
    heads = [linear(x[:, h], packed[h], None, out_features) for h in range(x.shape[1])]
    return torch.stack(heads, dim=1)


def quantized_linear(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    bias: Tensor | None,
    out_features: int,
    format: str,
) -> Tensor:
    weight = dequantize(words, scales, zeros, out_features, format)
    bias = None if bias is None else bias.float()
    return functional.linear(x.float(), weight, bias).to(x.dtype).contiguous()


def _normalise(total: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    scaled = total * torch.rsqrt(total.square().mean(dim=-1, keepdim=True) + eps)
    return (scaled.to(weight.dtype) * weight).to(dtype).contiguous()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return _normalise(x.float(), weight, eps, x.dtype)


def fused_add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    total = (x.float() + residual.float()).contiguous()
    new_residual = total.to(x.dtype, copy=True)
    return _normalise(total, weight, eps, x.dtype), new_residual


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    return functional.layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": partial(functional.gelu, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
}


def activate(x: Tensor, function: str, gated: bool) -> Tensor:
    apply = ACTIVATIONS[function]
    if not gated:
        return apply(x.float()).to(x.dtype).contiguous()
    gate, up = x.float().chunk(2, dim=-1)
    return (apply(gate) * up).to(x.dtype).contiguous()


def rotary_embedding(
    positions: Tensor, q: Tensor, k: Tensor, cos_sin_cache: Tensor, head_size: int, is_neox: bool
) -> tuple[Tensor, Tensor]:
    cos, sin = cos_sin_cache[positions.flatten().long()].float().chunk(2, dim=-1)
    tables = cos.unsqueeze(1), sin.unsqueeze(1)
    return _rotate(q, *tables, head_size, is_neox), _rotate(k, *tables, head_size, is_neox)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, head_size: int, is_neox: bool) -> Tensor:
    heads = x.reshape(cos.shape[0], -1, head_size).float()
    rotary_dim = 2 * cos.shape[-1]
    turning, kept = heads[..., :rotary_dim], heads[..., rotary_dim:]
    if is_neox:
        first, second = turning.chunk(2, dim=-1)
    else:
        first, second = turning[..., ::2], turning[..., 1::2]
    turned = (first * cos - second * sin, second * cos + first * sin)
    joined = torch.cat(turned, dim=-1) if is_neox else torch.stack(turned, dim=-1).flatten(-2)
    return torch.cat((joined, kept), dim=-1).to(x.dtype).reshape(x.shape).contiguous()


def take_rows(x: Tensor, numbers: Tensor) -> Tensor:
    return x[numbers]


def greedy(logits: Tensor) -> Tensor:
    return logits.nan_to_num(-torch.inf, torch.inf, -torch.inf).argmax(-1, keepdim=True).int()


def sample(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None,
    randoms: Tensor,
) -> Tensor:
    """Draw a token of each row of logits [n, V]: int32 [n, 1], bit by bit as the C++ kernel."""
    is_greedy = ~(temperature >= _GREEDY_TEMPERATURE)
    scores = logits.float() / torch.where(is_greedy, 1.0, temperature)[:, None]
    scores = torch.where(scores.isnan(), -torch.inf, scores)
    largest, first = scores.max(-1, keepdim=True)
    first = (scores == largest).int().argmax(-1, keepdim=True)
    weights = _weights(scores, largest)
    units = (weights * _UNITS + 0.5).long()
    if min_p is not None:
        units[weights < min_p[:, None]] = 0
    if top_k is not None:
        # Scores below the k-th largest.
        width = scores.shape[1]
        has_limit = (top_k > 0) & (top_k < width)
        kth = torch.where(has_limit, width - top_k, 0).long()[:, None]
        least = scores.sort(-1).values.gather(1, kth)
        units[has_limit[:, None] & (scores < least)] = 0
    if top_p is not None:
        # Units that add up to at most 1 - top_p, from the smallest score on. Zero units come first:
        # a row's last in order is then one that may be drawn.
        order = torch.where(units > 0, scores, -torch.inf).sort(stable=True).indices
        ends = units.gather(1, order).cumsum(-1)
        total = ends[:, -1:]
        limit = ((1.0 - top_p)[:, None].double() * total.double()).long().minimum(total - 1)
        drops = torch.zeros_like(units, dtype=torch.bool).scatter_(1, order, ends <= limit)
        units[drops & (top_p < 1.0)[:, None]] = 0
    ends = units.cumsum(-1)
    # Python's integers: the products have more than 64 bits.
    places = [
        (random % 2**64) * total >> 64
        for random, total in zip(randoms.tolist(), ends[:, -1].tolist(), strict=True)
    ]
    drawn = torch.searchsorted(ends, torch.tensor(places).view(-1, 1), right=True)
    is_first = is_greedy[:, None] | (ends[:, -1:] == 0)
    return torch.where(is_first, first, drawn).int()


def _weights(scores: Tensor, largest: Tensor) -> Tensor:
    """Return e^(scores - largest), float32 [n, V]."""
    x = (scores - largest).nan_to_num(-30.0).clamp(min=-30.0)
    n = (x * 1.44269504 + _MAGIC) - _MAGIC
    r = (x - n * 0.693359375) + n * 2.12194440e-4
    p = r * 1.381455966e-3 + 8.368735580e-3
    for coefficient in (4.166838986e-2, 1.666652048e-1, 4.999999344e-1, 1.0, 1.0):
        p = p * r + coefficient
    power = (n + (_MAGIC + 127.0)).view(torch.int32) << 23
    return p * power.view(torch.float32)


def penalize_(
    logits: Tensor,
    prompts: Tensor,
    outputs: Tensor,
    output_ends: Tensor,
    presence: Tensor,
    frequency: Tensor,
    repetition: Tensor,
) -> None:
    rows, width = logits.shape
    is_seen = torch.zeros(rows, width + 1, dtype=torch.bool)
    is_seen.scatter_(1, prompts.where((prompts >= 0) & (prompts < width), width), True)
    counts = torch.zeros(rows, width + 1)
    begin = 0
    for row, end in enumerate(output_ends.tolist()):
        own = outputs[begin:end].long()
        counts[row].index_add_(
            0, own.where((own >= 0) & (own < width), width), torch.ones(len(own))
        )
        begin = end
    counts, is_seen = counts[:, :width], is_seen[:, :width]
    factors = torch.where(is_seen | (counts > 0), repetition[:, None], 1.0)
    logits *= torch.where(logits > 0, 1.0 / factors, factors)
    logits -= frequency[:, None] * counts
    logits -= presence[:, None] * (counts > 0)


def top_logprobs(
    logits: Tensor, tokens: Tensor, count: int, is_normalized: bool
) -> tuple[Tensor, Tensor, Tensor]:
    scores = logits.float()
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    ids = torch.cat((tokens[:, None].long(), order), dim=-1)
    own = scores.gather(1, ids[:, :1])
    ranks = (scores >= own).sum(-1)
    values = scores.log_softmax(-1) if is_normalized else scores
    return ids.int(), values.gather(1, ids), ranks


def self_attention(
    q: Tensor,
    q_column: int,
    k: Tensor,
    k_column: int,
    v: Tensor,
    v_column: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    positions: Tensor | None,
    cos_sin_cache: Tensor | None,
    is_neox: bool,
    kv_cache: Tensor,
    scale: Tensor,
    starts: Tensor,
    ends: Tensor | None,
    block_tables: Tensor,
    sinks: Tensor | None,
    logits_soft_cap: float | None,
    alibi_slopes: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    attention_chunk: int | None,
    attention_window: int | None,
    group: int,
    batch: int,
    query_counts: Tensor | None = None,
) -> Tensor:
    kv_heads, head_size = kv_cache.shape[2], kv_cache.shape[5]
    width = kv_heads * head_size
    new_q = _normed_heads(q[:, q_column : q_column + group * width], q_norm, head_size, eps)
    new_k = _normed_heads(k[:, k_column : k_column + width], k_norm, head_size, eps)
    if positions is not None and cos_sin_cache is not None:
        tables = (cos_sin_cache, head_size, is_neox)
        new_q, new_k = rotary_embedding(positions, new_q, new_k, *tables)
    q_heads, k_heads, v_heads = (
        x.reshape(batch, -1, kv_heads, x.shape[-1] // width, head_size).permute(0, 2, 3, 1, 4)
        for x in (new_q, new_k, v[:, v_column : v_column + width])
    )
    rows = (q_heads, k_heads, v_heads, kv_cache)
    options: dict[str, Any] = {
        "sinks": sinks,
        "logits_soft_cap": logits_soft_cap,
        "alibi_slopes": alibi_slopes,
        "k_scale": k_scale,
        "v_scale": v_scale,
        "query_counts": query_counts,
    }
    if ends is None:
        options |= {"attention_chunk": attention_chunk, "attention_window": attention_window}
        out = fallback_attention.flash_causal_attention(
            *rows, scale, starts, block_tables, scale, **options
        )
    else:
        out = fallback_attention.sliding_window_prefill(
            *rows, starts, ends, scale, block_tables, scale, **options
        )
    return out.permute(0, 3, 1, 2, 4).reshape(q.shape[0], group * width)


def _normed_heads(x: Tensor, weight: Tensor | None, head_size: int, eps: float) -> Tensor:
    if weight is None:
        return x
    return rms_norm(x.unflatten(-1, (-1, head_size)), weight, eps).flatten(-2)


BODIES: Mapping[str, Mapping[str, Callable[..., Any]]] = {
    ops.NAMESPACE: {
        body.__name__: body
        for body in (
            pack_linear_weight,
            pack_linear_weight_,
            linear,
            linear_heads,
            quantized_linear,
            rms_norm,
            fused_add_rms_norm,
            layer_norm,
            activate,
            rotary_embedding,
            greedy,
            take_rows,
            self_attention,
            add_lora_,
            sample,
            penalize_,
            top_logprobs,
            fallback_attention.shared_attention,
            fallback_attention.latent_attention,
            moe_route,
            moe,
            moe_masked,
            quantized_moe,
            quantized_moe_masked,
        )
    },
    "rbln_emulated_ops": fallback_attention.BODIES,
}


def register() -> list[torch.library.Library]:
    """Make these bodies the CPU implementation for as long as the returned libraries live."""
    libraries = []
    with warnings.catch_warnings():
        # The message appears if the C++ bodies were active before, which the caller changes here.
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for namespace, bodies in BODIES.items():
            library = torch.library.Library(namespace, "IMPL")
            for name, body in bodies.items():
                library.impl(name, body, "CPU")
            libraries.append(library)
    return libraries
