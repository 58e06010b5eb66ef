"""The custom kernel: an op takes each row's weight of each expert, and how many chose each."""

from __future__ import annotations

import torch
from torch import Tensor

from rbln_backend.moe.experts import Experts
from rbln_backend.moe.paths import RoutedTokens
from rbln_backend.moe.routing import Routing


def run_custom(tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
    """See ``ExpertPath``."""
    weights = tokens.weights_by_expert(routing, experts.count)
    counts = (weights != 0).sum(dim=0, dtype=torch.int32)
    return experts.weighted(tokens.x, weights, counts)
