"""The SDK's op for experts, as vllm-rbln 0.11 and later call it; it never ran on an NPU here.

``rbln_custom_ops::custom_moe_glu`` has had three signatures. This is the one of the SDK that pairs
with vLLM 0.30 (reference/rbln-stack.md 5.3): gate and up [E, I, H], down [E, H, I], the routing
weights [E of all ranks, T] in the dtype of the hidden states, the activation's name, an expert map.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from rbln_backend.moe.experts import Experts, PlainExperts
from rbln_backend.moe.paths import RoutedTokens
from rbln_backend.moe.routing import Routing, local_ids, weights_by_expert

NAMESPACE = "rbln_custom_ops"
SCHEMA = (
    "custom_moe_glu(Tensor hidden_states, Tensor gate_proj_weight, Tensor up_proj_weight,"
    " Tensor down_proj_weight, Tensor masked_routing_weight, str hidden_act,"
    " Tensor? expert_map=None, Tensor? gate_proj_bias=None, Tensor? up_proj_bias=None,"
    " Tensor? down_proj_bias=None) -> Tensor"
)
# The documented callers pad the weights of few tokens: the compiler wants 64 along that axis.
FEW_TOKENS, PADDED_TOKENS = 8, 64


def run_glu_op(tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
    """See ``ExpertPath``; experts are halves of w13, as every activation that the op knows has."""
    assert isinstance(experts, PlainExperts)  # others are refused where the path is chosen
    weights, ids = routing.choose(tokens.x, tokens.logits)
    everywhere = local_ids(ids, None, tokens.tokens_mask)
    by_expert = weights_by_expert(weights, everywhere, tokens.logits.shape[1]).t()
    rows, inner = tokens.x.shape[0], experts.intermediate_size
    if rows <= FEW_TOKENS:
        by_expert = functional.pad(by_expert, (0, PADDED_TOKENS - rows))
    mixed: Tensor = torch.ops.rbln_custom_ops.custom_moe_glu(
        *(tokens.x, experts.w13[:, :inner], experts.w13[:, inner:], experts.w2),
        *(by_expert.to(tokens.x.dtype), experts.activation, tokens.expert_map),
        *_split_biases(experts, inner),
    )
    return mixed


def _split_biases(experts: PlainExperts, inner: int) -> tuple[Tensor | None, ...]:
    if experts.w13_bias is None:
        return None, None, experts.w2_bias
    return experts.w13_bias[:, :inner], experts.w13_bias[:, inner:], experts.w2_bias


def _glu_on_cpu(
    x: Tensor,
    gate: Tensor,
    up: Tensor,
    down: Tensor,
    weights: Tensor,
    hidden_act: str,
    expert_map: Tensor | None = None,
    gate_bias: Tensor | None = None,
    up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
) -> Tensor:
    """What the op means, for contract tests and eager runs."""
    activate = functional.silu if hidden_act in ("silu", "swish") else functional.gelu
    total = torch.zeros_like(x, dtype=torch.float32)
    for number in range(gate.shape[0]):
        everywhere = number if expert_map is None else int((expert_map == number).nonzero())
        share = weights[everywhere, : x.shape[0], None].float()
        inner = activate(functional.linear(x, gate[number], _of(gate_bias, number)))
        inner = inner * functional.linear(x, up[number], _of(up_bias, number))
        total += functional.linear(inner, down[number], _of(down_bias, number)).float() * share
    return total.to(x.dtype)


def _of(bias: Tensor | None, number: int) -> Tensor | None:
    return None if bias is None else bias[number]


def _define() -> torch.library.Library:
    library = torch.library.Library(NAMESPACE, "FRAGMENT")
    library.define(SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    name = f"{NAMESPACE}::custom_moe_glu"
    torch.library.register_fake(name, lambda x, *_: x.new_empty(x.shape), lib=library)
    library.impl("custom_moe_glu", _glu_on_cpu, "CPU")
    return library


LIBRARY = _define()
