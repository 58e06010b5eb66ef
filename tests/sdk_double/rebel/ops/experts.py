"""The experts of a layer, given what each token wants of each expert.

``custom_moe_glu`` takes plain weights, ``custom_moe_glu_group_dequantize`` e4m3 in blocks or NVFP4,
and ``custom_moe_glu_w8a8`` tokens of e4m3 in groups, too.
"""

from __future__ import annotations

from typing import Any

import torch
from rebel.ops.library import CUSTOM, define, describe
from rebel.ops.nvfp4 import NVFP4, check_nvfp4, from_nvfp4
from rebel.rules import require
from rebel.settings import SETTINGS
from torch import Tensor
from torch.nn import functional

_ARGUMENTS = (
    "Tensor hidden_states, Tensor gate_proj_weight, Tensor up_proj_weight, Tensor down_proj_weight,"
    " Tensor masked_routing_weight, str hidden_act, Tensor? expert_map, Tensor? gate_proj_bias,"
    " Tensor? up_proj_bias, Tensor? down_proj_bias"
)
_BLOCKS = (
    "Tensor hidden_states, Tensor gate_proj_weight, Tensor gate_proj_scale, Tensor up_proj_weight,"
    " Tensor up_proj_scale, Tensor down_proj_weight, Tensor down_proj_scale,"
    " Tensor masked_routing_weight, Tensor group_size, str hidden_act, Tensor? gate_proj_bias,"
    " Tensor? up_proj_bias, Tensor? down_proj_bias, Tensor? expert_map, *,"
    " Tensor? gate_proj_scale_2=None, Tensor? up_proj_scale_2=None,"
    " Tensor? down_proj_scale_2=None, str? weight_dtype=None"
)
_LIMITS = "float? swiglu_alpha=None, float? swiglu_limit=None, float? swiglu_beta=None"
_W8A8 = (
    "Tensor hidden_states, Tensor hidden_scale, Tensor gate_proj_weight, Tensor gate_proj_scale,"
    " Tensor up_proj_weight, Tensor up_proj_scale, Tensor down_proj_weight, Tensor down_proj_scale,"
    " Tensor masked_routing_weight, Tensor group_size, str hidden_act, ScalarType compute_dtype,"
    " Tensor? gate_proj_bias, Tensor? up_proj_bias, Tensor? down_proj_bias, Tensor? expert_map"
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


def moe_glu_blocks(
    x: Tensor,
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    routing: Tensor,
    group_size: Tensor,
    hidden_act: str,
    gate_bias: Tensor | None,
    up_bias: Tensor | None,
    down_bias: Tensor | None,
    expert_map: Tensor | None,
    *,
    gate_proj_scale_2: Tensor | None = None,
    up_proj_scale_2: Tensor | None = None,
    down_proj_scale_2: Tensor | None = None,
    weight_dtype: str | None = None,
    swiglu_alpha: float | None = None,
    swiglu_limit: float | None = None,
    swiglu_beta: float | None = None,
) -> Tensor:
    """As ``moe_glu`` with e4m3 weights [E, N, K] and float32 scales [E, rows, K / group_size].

    With ``weight_dtype`` float4_e2m1fn: see ``from_nvfp4``.
    """
    assert swiglu_alpha is swiglu_limit is swiglu_beta is None
    pairs = ((gate, gate_scale), (up, up_scale), (down, down_scale))
    if weight_dtype == NVFP4:
        seconds = (gate_proj_scale_2, up_proj_scale_2, down_proj_scale_2)
        parts = zip(pairs, seconds, strict=True)
        plain = [from_nvfp4(*pair, second, int(group_size)) for pair, second in parts]
    else:
        plain = [_from_blocks(weight, scale, int(group_size)) for weight, scale in pairs]
    return moe_glu(x, *plain, routing, hidden_act, expert_map, gate_bias, up_bias, down_bias)


def moe_glu_bytes(x: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    """As ``moe_glu_blocks`` of x [T, H] in e4m3 with float32 scales [T, H / group_size].

    What is between the two products is not rounded: their code does not say whether the op does.
    """
    *weights, routing, group_size, hidden_act, dtype = rest[:10]
    spread = scale.repeat_interleave(int(group_size), 1)
    if "scales" in SETTINGS.broken:
        spread = spread.flip(1)
    plain = x.float() * spread
    found = moe_glu_blocks(plain, *weights, routing, group_size, hidden_act, *rest[10:])
    return found.to(dtype)


def _from_blocks(weight: Tensor, scale: Tensor, group: int) -> Tensor:
    """Weight [E, N, K] in float32; with ``scales`` broken groups have each other's scales."""
    _, columns, depth = weight.shape
    if "scales" in SETTINGS.broken:
        scale = scale.flip(2)
    rows = -(-columns // scale.shape[1])
    spread = scale.float().repeat_interleave(rows, 1)[:, :columns].repeat_interleave(group, 2)
    return weight.float() * spread[:, :, :depth]


def _fake_blocks(
    x: Tensor,
    gate: Tensor,
    gate_scale: Tensor,
    up: Tensor,
    up_scale: Tensor,
    down: Tensor,
    down_scale: Tensor,
    routing: Tensor,
    group_size: Tensor,
    hidden_act: str,
    *rest: object,
    weight_dtype: str | None = None,
    **seconds: Tensor | None,
) -> Tensor:
    if weight_dtype is None:
        dtypes = {gate.dtype, up.dtype, down.dtype}
        require("schema", dtypes == {torch.float8_e4m3fn}, f"weights are {dtypes}, not e4m3")
    else:
        pairs = ((gate, gate_scale), (up, up_scale), (down, down_scale))
        scales = [one for name, one in seconds.items() if name.endswith("_scale_2")]
        check_nvfp4(weight_dtype, pairs, scales)
    one_number = group_size.dim() == 0 and group_size.dtype == torch.int32
    require("schema", one_number, f"group_size is {describe(group_size)}, not int32[]")
    return _fake(x, gate, up, down, routing, hidden_act)


def _fake_bytes(x: Tensor, scale: Tensor, *rest: Any) -> Tensor:
    *weights, routing, group_size, hidden_act, dtype = rest[:10]
    is_e4m3 = x.dtype == torch.float8_e4m3fn and scale.dtype == torch.float32
    groups = x.dim() == scale.dim() == 2 and x.shape[1] % scale.shape[1] == 0
    told = f"hidden_states {describe(x)} with scales {describe(scale)}"
    require("schema", is_e4m3 and groups, f"{told} are not e4m3 in groups")
    return _fake_blocks(x, *weights, routing, group_size, hidden_act).to(dtype)


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
define(
    CUSTOM, "custom_moe_glu_group_dequantize", _BLOCKS, moe_glu_blocks, _fake_blocks, later=_LIMITS
)
define(CUSTOM, "custom_moe_glu_w8a8", _W8A8, moe_glu_bytes, _fake_bytes)
