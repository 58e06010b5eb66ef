"""``custom_moe_glu``: the experts of a layer, given what each token wants of each expert."""

from __future__ import annotations

import torch
from rebel.ops.library import CUSTOM, define, describe
from rebel.rules import require
from torch import Tensor
from torch.nn import functional

_ARGUMENTS = (
    "Tensor hidden_states, Tensor gate_proj_weight, Tensor up_proj_weight, Tensor down_proj_weight,"
    " Tensor masked_routing_weight, str hidden_act, Tensor? expert_map, Tensor? gate_proj_bias,"
    " Tensor? up_proj_bias, Tensor? down_proj_bias"
)
_ACTIVATIONS = {
    "silu": functional.silu,
    "swish": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


def moe_glu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    routing: Tensor,
    hidden_act: str,
    expert_map: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """x [T, H]; gate and up [E, I, H]; down [E, H, I]; routing [E of all ranks, T or more]."""
    activate = _ACTIVATIONS[hidden_act]
    total = torch.zeros(x.shape, dtype=torch.float32)
    numbers = range(routing.shape[0]) if expert_map is None else expert_map.tolist()
    for everywhere, local in enumerate(numbers):
        if not 0 <= local < gate.shape[0]:  # lives on another rank
            continue
        w = [part[local].float() for part in (gate, up, down)]
        b = [
            None if bias is None else bias[local].float()
            for bias in (gate_bias, up_bias, down_bias)
        ]
        inner = activate(functional.linear(x.float(), w[0], b[0]))
        inner = inner * functional.linear(x.float(), w[1], b[1])
        share = routing[everywhere, : x.shape[0], None].float()
        total += functional.linear(inner, w[2], b[2]) * share
    return total.to(x.dtype)


def _fake(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    routing: Tensor,
    hidden_act: str,
    *rest: object,
) -> Tensor:
    enough = routing.dim() == 2 and routing.shape[0] >= gate.shape[0]
    require(
        "schema", enough, f"masked_routing_weight is {describe(routing)}, not [experts, tokens]"
    )
    require("schema", hidden_act in _ACTIVATIONS, f"hidden_act is {hidden_act!r}")
    return torch.empty_like(x)


define(CUSTOM, "custom_moe_glu", _ARGUMENTS, moe_glu, _fake)
