"""Ops that the SDK has and the double only knows the form of: calling one says so."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from rebel.ops.library import CUSTOM, define
from torch import Tensor

_EXPERT_MAP = "Tensor? expert_map"
_BIASES = "Tensor? gate_proj_bias, Tensor? up_proj_bias, Tensor? down_proj_bias"
_SCALED = (
    "Tensor gate_proj_weight, Tensor gate_proj_scale, Tensor up_proj_weight, Tensor up_proj_scale,"
    " Tensor down_proj_weight, Tensor down_proj_scale, Tensor masked_routing_weight"
)

UNDONE = {
    "custom_moe_glu_w8a8": (
        f"Tensor hidden_states, Tensor hidden_scale, {_SCALED}, Tensor group_size, str hidden_act,"
        f" ScalarType compute_dtype, {_BIASES}, {_EXPERT_MAP}"
    ),
}


def _refuse(name: str) -> Any:
    def body(*arguments: object, **named: object) -> NoReturn:
        raise NotImplementedError(f"the SDK double has no body for {name}")

    return body


def _fake(x: Tensor, *rest: object, **named: object) -> Tensor:
    return torch.empty_like(x)


for _name, _arguments in UNDONE.items():
    define(CUSTOM, _name, _arguments, _refuse(_name), _fake)
