"""PyTorch bodies of the ops for experts and adapters; ``moe`` takes plain matrices here, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from rbln_backend.emulator.packing import unpack
from rbln_backend.emulator.quantized_packing import dequantize

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


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"silu": _silu, "swigluoai": _swigluoai}


def moe_route(
    logits: Tensor,
    top_k: int,
    renormalize: bool,
    expert_map: Tensor | None = None,
    tokens_mask: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """logits [T, E] to weights float32 and ids int32, both [T, top_k]."""
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
    """Add the low-rank part of x [T, K] to y [T, sum of out_features]."""
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

    def of(self, experts: Tensor) -> _Adapters:
        """Return the adapter slots of these experts int [n], in their order."""
        stacks = [None if stack is None else stack[experts] for stack in self[1:-1]]
        return _Adapters._make([self.slots, *stacks, self.rank])

    def add_first(self, gate_up: Tensor, x: Tensor, rows: Tensor, expert: int) -> None:
        """To an expert's products of ``rows``, of which x [T, H] holds all."""
        b = [stack[expert] for stack in (self.b1, self.b3) if stack is not None]
        self._add(gate_up, x[rows], self._of_rows(rows, len(x)), self.a13, b, expert)

    def add_second(
        self, out: Tensor, hidden: Tensor, rows: Tensor, count: int, expert: int
    ) -> None:
        """Add the low-rank part of hidden [n, I] to out [n, H]."""
        b = [stack[expert] for stack in (self.b2,) if stack is not None]
        self._add(out, hidden, self._of_rows(rows, count), self.a2, b, expert)

    def _of_rows(self, rows: Tensor, count: int) -> Tensor | None:
        if self.slots is None:
            return None
        return self.slots[rows // (count // self.slots.numel())]

    def _add(
        self,
        y: Tensor,
        x: Tensor,
        slots: Tensor | None,
        a: Tensor | None,
        b: list[Tensor],
        expert: int,
    ) -> None:
        if slots is not None and a is not None:
            add_lora_(y, x, slots, a[expert], b, self.rank, [y.shape[-1] // len(b)] * len(b))


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
    total = x.new_zeros(x.shape, dtype=torch.float32)
    hidden_size = x.shape[-1]
    for expert in ids[ids >= 0].unique().tolist():
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        first = _matrix(w13[expert], 2 * intermediate_size, hidden_size)
        second = _matrix(w2[expert], hidden_size, intermediate_size)
        gate_up = functional.linear(x[rows], first, _row(w13_bias, expert))
        adapted.add_first(gate_up, x, rows, expert)
        hidden = ACTIVATIONS[activation](gate_up.float()).to(x.dtype)
        out = functional.linear(hidden, second, _row(w2_bias, expert))
        adapted.add_second(out, hidden, rows, len(x), expert)
        total.index_add_(0, rows, out.float() * weights[rows, slots, None])
    return total.to(x.dtype)


def moe_masked(x: Tensor, weights: Tensor, counts: Tensor, *experts: Any) -> Tensor:
    """As ``moe``, with weights float32 [T, E]: experts of weight 0 are not chosen."""
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
    """As ``moe``, x [T, H] to [T, H], over dequantized matrices of the chosen experts."""
    first = (w13, w13_scales, w13_zeros, 2 * intermediate_size, w13_format)
    second = (w2, w2_scales, w2_zeros, x.shape[-1], w2_format)
    chosen = ids[ids >= 0].unique()
    plain = [_plain_stack(chosen, x.dtype, *stack) for stack in (first, second)]
    numbers = torch.full((w13.shape[0] + 1,), -1, dtype=torch.int32)
    numbers[chosen] = torch.arange(len(chosen), dtype=torch.int32)
    biases = [None if bias is None else bias[chosen] for bias in (w13_bias, w2_bias)]
    experts = (plain[0], biases[0], plain[1], biases[1])
    sizes = (intermediate_size, activation)
    return moe(x, weights, numbers[ids], *experts, *sizes, *_Adapters(*adapters).of(chosen))


def _plain_stack(
    chosen: Tensor,
    dtype: torch.dtype,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    width: int,
    written: str,
) -> Tensor:
    """[chosen, width, inputs] of ``dtype``."""
    made = [
        dequantize(words[e], scales[e], None if zeros is None else zeros[e], width, written)
        for e in chosen.tolist()
    ]
    return torch.stack(made).to(dtype) if made else words.new_empty(0, dtype=dtype)


def quantized_moe_masked(x: Tensor, weights: Tensor, counts: Tensor, *experts: Any) -> Tensor:
    """As ``moe_masked``, x [T, H] to [T, H], over quantized experts."""
    return quantized_moe(x, weights, _chosen_ids(weights, counts), *experts)


def _chosen_ids(weights: Tensor, counts: Tensor) -> Tensor:
    numbers = torch.arange(weights.shape[1], dtype=torch.int32)
    return torch.where((weights != 0) & (counts > 0), numbers, -1)


def _matrix(weight: Tensor, out_features: int, in_features: int) -> Tensor:
    return weight if weight.dim() == 2 else unpack(weight, out_features, in_features)


def _row(bias: Tensor | None, expert: int) -> Tensor | None:
    return None if bias is None else bias[expert]
