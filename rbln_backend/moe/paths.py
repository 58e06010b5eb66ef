"""The documented ways to compute experts, and which one a layer takes, decided when it is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from rbln_backend.moe.experts import Experts
from rbln_backend.moe.routing import Routing, local_ids, weights_by_expert

PathName = Literal["opt", "custom", "glu", "native"]
"""As operators know them; ``native`` is the loop of plain operators."""

TOKENS_MASK = "tokens_mask"
"""The graph input that tells rows from padding."""
OPT_SWITCH = "VLLM_RBLN_MOE_USE_OPT_KERNEL"
CUSTOM_SWITCH = "VLLM_RBLN_MOE_CUSTOM_KERNEL"
# What the SDK's op computes itself: vllm-rbln 0.12 names SiLU and GELU.
_GLU_ACTIVATIONS = ("silu", "gelu")


class Choice(NamedTuple):
    """A path and why it was taken."""

    path: PathName
    reason: str


def choose_path(*, use_opt: bool, use_custom: bool, has_fused_op: bool, activation: str) -> Choice:
    """The optimised kernel before the custom one before plain operators.

    The SDK that pairs with vLLM 0.30 has a single op for both switches.
    """
    if not use_opt and not use_custom:
        return Choice("native", f"{OPT_SWITCH} and {CUSTOM_SWITCH} are off")
    if has_fused_op and activation not in _GLU_ACTIVATIONS:
        return Choice("native", f"the SDK's op for experts has no activation {activation!r}")
    if has_fused_op:
        return Choice("glu", "the SDK has one op for experts")
    if use_opt:
        return Choice("opt", f"{OPT_SWITCH} is on")
    return Choice("custom", f"{CUSTOM_SWITCH} is on and {OPT_SWITCH} off")


@dataclass
class RoutedTokens:
    """T rows on their way to a layer's experts."""

    x: Tensor
    """[T, H]."""
    logits: Tensor
    """[T, E], of the experts of all ranks."""
    expert_map: Tensor | None
    """int32 [E]: this rank's number of each expert, -1 for those of others; None: all are here."""
    tokens_mask: Tensor | None
    """float32 [T, 1]: 0 in padding; None: every row counts."""
    here: Sequence[int]
    """This rank's experts in its order, as all ranks number them."""
    on_host: bool
    """The graph runs on the emulated device."""

    def by_expert(self, routing: Routing, count: int) -> tuple[Tensor, Tensor]:
        """Return the experts' input and the weight of each of this rank's experts, 0 if not chosen.

        [T, H] and float32 [T, count].
        """
        x, weights, ids = routing.route(self.x, self.logits)
        here = local_ids(ids, self.expert_map, self.tokens_mask)
        return x, weights_by_expert(weights, here, count)


class ExpertPath(Protocol):
    """One way; stateless."""

    def __call__(self, tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
        """[T, H]: this rank's experts' part of every row."""
        ...


def run_opt(tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
    """Tokens [T, H] to [T, H]: one op takes the router's logits, after routing it does not know."""
    x = tokens.x
    if routing.is_plain:
        weights, ids = torch.ops.rbln_emulator.moe_route(
            *(tokens.logits, routing.top_k, routing.renormalize),
            *(tokens.expert_map, tokens.tokens_mask),
        )
    else:
        x, weights, chosen = routing.route(x, tokens.logits)
        ids = local_ids(chosen, tokens.expert_map, tokens.tokens_mask)
    return experts.chosen(x, weights, ids)


def run_custom(tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
    """Tokens [T, H] to [T, H]: one op takes each row's expert weights and rows per expert."""
    x, weights = tokens.by_expert(routing, experts.count)
    counts = (weights != 0).sum(dim=0, dtype=torch.int32)
    return experts.weighted(x, weights, counts)


def run_plain(tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
    """Tokens [T, H] to [T, H]: every expert over every row, then weighted; several nodes each."""
    if tokens.on_host:
        # torch's kernels over columns make the bits of a row depend on the number of rows.
        x, weights = tokens.by_expert(routing, experts.count)
        shares, scale = [weights[:, n : n + 1] for n in range(experts.count)], 1.0
    else:
        x, weights = routing.spread(tokens.x, tokens.logits.float(), tokens.tokens_mask)
        shares, scale = [weights[number].unsqueeze(1) for number in tokens.here], routing.scale
    total = torch.zeros_like(x, dtype=torch.float32)
    for number, share in enumerate(shares):
        total = total + experts.expert(x, number).float() * share
    return (total if scale == 1.0 else total * scale).to(x.dtype)
