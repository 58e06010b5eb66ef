"""What the ways to compute experts have in common."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from rbln_backend.moe.experts import Experts
from rbln_backend.moe.routing import Routing, local_ids, weights_by_expert

TOKENS_MASK = "tokens_mask"
"""The graph input that tells rows from padding."""


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

    def weights_by_expert(self, routing: Routing, count: int) -> Tensor:
        """float32 [T, count]: what this rank's experts count in each row, 0 if not chosen."""
        weights, ids = routing.choose(self.x, self.logits)
        here = local_ids(ids, self.expert_map, self.tokens_mask)
        return weights_by_expert(weights, here, count)


class ExpertPath(Protocol):
    """One way; stateless."""

    def __call__(self, tokens: RoutedTokens, routing: Routing, experts: Experts) -> Tensor:
        """[T, H]: this rank's experts' part of every row."""
        ...
