"""The SDK's op: its documented arguments, and what its CPU body makes of them."""

from __future__ import annotations

import torch

from rbln_backend.moe import glu_op

OP = torch.ops.rbln_custom_ops.custom_moe_glu


def test_arguments_are_the_documented_ones() -> None:
    assert glu_op.NAMESPACE == "rbln_custom_ops"
    assert [argument.name for argument in OP.default._schema.arguments] == [
        *("hidden_states", "gate_proj_weight", "up_proj_weight", "down_proj_weight"),
        *("masked_routing_weight", "hidden_act", "expert_map"),
        *("gate_proj_bias", "up_proj_bias", "down_proj_bias"),
    ]


def test_parts_of_two_ranks_add_up() -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(3, 8), torch.rand(4, 64)
    gate, up, down = torch.randn(4, 6, 8), torch.randn(4, 6, 8), torch.randn(4, 8, 6)
    biases = torch.randn(4, 6), torch.randn(4, 6), torch.randn(4, 8)
    whole = OP(x, gate, up, down, weights, "silu", None, *biases)
    expected = torch.zeros(3, 8)
    for e in range(4):
        inner = torch.nn.functional.silu(x @ gate[e].T + biases[0][e]) * (
            x @ up[e].T + biases[1][e]
        )
        expected += (inner @ down[e].T + biases[2][e]) * weights[e, :3, None]
    torch.testing.assert_close(whole, expected)
    parts = []
    for here in ([0, 3], [2, 1]):
        table = torch.full((4,), -1, dtype=torch.int32)
        table[here] = torch.arange(2, dtype=torch.int32)
        mine = [tensor[here] for tensor in (gate, up, down)]
        parts.append(OP(x, *mine, weights, "silu", table, *(bias[here] for bias in biases)))
    torch.testing.assert_close(parts[0] + parts[1], whole)
