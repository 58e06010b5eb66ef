"""Plain operators: every expert of the rank over every row, weighted afterwards."""

from __future__ import annotations

import torch
from torch import Tensor

from rbln_backend.moe.experts import Experts
from rbln_backend.moe.paths import RoutedTokens
from rbln_backend.moe.routing import Routing


def run_native(tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
    """See ``ExpertPath``. A graph of it has as many nodes as there are experts, several each."""
    weights = tokens.weights_by_expert(routing, experts.count)
    total = torch.zeros_like(tokens.x, dtype=torch.float32)
    for number in range(experts.count):
        share = weights[:, number : number + 1]
        total = total + experts.expert(tokens.x, number).float() * share
    return total.to(tokens.x.dtype)
