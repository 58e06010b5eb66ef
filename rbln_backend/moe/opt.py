"""The optimised kernel: an op takes the router's logits and reads the chosen experts alone."""

from __future__ import annotations

import torch
from torch import Tensor

from rbln_backend.moe.experts import Experts
from rbln_backend.moe.paths import RoutedTokens
from rbln_backend.moe.routing import Routing, local_ids


def run_opt(tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
    """See ``ExpertPath``. Routing that the op does not know is plain operators before it."""
    if routing.is_plain:
        weights, ids = torch.ops.rbln_emulator.moe_route(
            *(tokens.logits, routing.top_k, routing.renormalize),
            *(tokens.expert_map, tokens.tokens_mask),
        )
    else:
        weights, chosen = routing.choose(tokens.x, tokens.logits)
        ids = local_ids(chosen, tokens.expert_map, tokens.tokens_mask)
    return experts.chosen(tokens.x, weights, ids)
