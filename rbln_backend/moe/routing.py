"""Which experts a row goes to and how much each counts, in operators that a graph can hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Scoring = Callable[[Tensor], Tensor]
SCORINGS: dict[str, Scoring] = {
    "softmax": lambda logits: logits.softmax(dim=-1),
    "sigmoid": torch.sigmoid,
    "sqrtsoftplus": lambda logits: functional.softplus(logits).sqrt(),
}


@dataclass
class Routing:
    """Routing of one layer: each row goes to ``top_k`` of the E experts of all ranks."""

    top_k: int
    renormalize: bool = True
    """The weights of a row sum to one, before ``scale``."""
    scoring: str = "softmax"
    """A name of ``SCORINGS``."""
    groups: int = 1
    """Experts are equally many in each group; only the best ``top_groups`` are open to a row."""
    top_groups: int = 1
    bias: Tensor | None = None
    """[E]: added to the scores that choose, not to the weights."""
    scale: float = 1.0
    function: Callable[..., Any] | None = None
    """The model's own, in place of all above: vLLM's ``custom_routing_function``."""
    on_input: bool = False
    """The one expert of a row gets the row times its weight, and its result counts as it is."""

    @property
    def is_plain(self) -> bool:
        """True if it is the softmax that the ops of both devices implement."""
        return (
            self.function is None
            and self.scoring == "softmax"
            and self.groups == 1
            and self.bias is None
            and self.scale == 1.0
            and not self.on_input
        )

    def route(self, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the experts' input [T, H], their weights float32 [T, top_k] and ids [T, top_k]."""
        weights, ids = self.choose(x, logits)
        if not self.on_input:
            return x, weights, ids
        return x * weights.to(x.dtype), torch.ones_like(weights), ids

    def choose(self, x: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H], logits [T, E]; returns weights float32 and ids int64 [T, top_k]."""
        if self.function is not None:
            weights, ids = self.function(
                hidden_states=x, gating_output=logits, topk=self.top_k, renormalize=self.renormalize
            )
            return weights.float(), ids.long()
        logits = logits.float()
        if self.is_plain and self.renormalize:
            best, ids = logits.topk(self.top_k, dim=-1)
            return best.softmax(dim=-1), ids
        scores = SCORINGS[self.scoring](logits)
        ids = self._open_scores(scores).topk(self.top_k, dim=-1)[1]
        weights = scores.gather(1, ids)
        if self.renormalize:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        return weights if self.scale == 1.0 else weights * self.scale, ids

    def _open_scores(self, scores: Tensor) -> Tensor:
        """Return the scores [T, E] for the choice: -inf outside of the groups open to a row."""
        biased = scores if self.bias is None else scores + self.bias.float()
        if self.groups == 1:
            return biased
        by_group = biased.unflatten(-1, (self.groups, -1))
        # As the models were trained: with a bias the two best experts speak for a group.
        best = by_group.topk(1 if self.bias is None else 2, dim=-1)[0].sum(dim=-1)
        chosen = best.topk(self.top_groups, dim=-1)[1]
        is_open = torch.zeros_like(best).scatter(1, chosen, 1.0)
        closed = (is_open == 0).unsqueeze(-1).expand_as(by_group)
        scores_open: Tensor = by_group.masked_fill(closed, float("-inf")).flatten(-2)
        return scores_open


def local_ids(ids: Tensor, expert_map: Tensor | None, tokens_mask: Tensor | None) -> Tensor:
    """ids [T, k] as this rank numbers its experts, int32; -1 for other ranks' and in padding.

    ``expert_map`` int32 [E]; ``tokens_mask`` float32 [T, 1], 0 in padding.
    """
    found = ids.int() if expert_map is None else expert_map[ids]
    return found if tokens_mask is None else found.masked_fill(tokens_mask == 0, -1)


def weights_by_expert(weights: Tensor, ids: Tensor, count: int) -> Tensor:
    """weights [T, k] of ``local_ids``, spread over this rank's ``count`` experts: [T, count]."""
    # Experts of other ranks and padding land in an extra column.
    columns = torch.where(ids < 0, count, ids).long()
    spread = weights.new_zeros(weights.shape[0], count + 1).scatter(1, columns, weights)
    return spread[:, :count].contiguous()
