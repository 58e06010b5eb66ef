"""Which experts a row goes to and how much each counts, in operators that a graph can hold."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

# Logits to scores of the same shape; experts are along the dimension.
Scoring = Callable[[Tensor, int], Tensor]
SCORINGS: dict[str, Scoring] = {
    "softmax": functional.softmax,
    "sigmoid": lambda logits, _: torch.sigmoid(logits),
    "sqrtsoftplus": lambda logits, _: functional.softplus(logits).sqrt(),
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
        scores = SCORINGS[self.scoring](logits, -1)
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

    def spread(
        self, x: Tensor, logits: Tensor, tokens_mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the experts' input [T, H] and the weight of each expert [E, T], 0 if not chosen.

        The weights leave ``scale`` out and have the dtype of ``logits`` [T, E], or of a bias if
        that is wider. ``tokens_mask`` float32 [T, 1], 0 in padding. The compiler of an NPU makes
        one op of this chain, whose operators and order are those of vllm-rbln 0.12
        (``fused_moe/runner/moe_runner.py``); it wants a mask as wide as the weights.
        """
        if self.groups > 1:
            by_expert = self._spread_of_groups(logits)
        else:
            columns = logits.transpose(0, 1)
            weights, ids = self._choose_by_column(x, logits, columns)
            if self.on_input:
                x, weights = x * weights.transpose(0, 1).to(x.dtype), torch.ones_like(weights)
            by_expert = _table(columns, weights, ids)
        if tokens_mask is not None:
            dtype = by_expert.dtype
            if self.bias is not None:
                dtype = torch.promote_types(dtype, self.bias.dtype)
            if tokens_mask.dtype != dtype:
                tokens_mask = tokens_mask.to(dtype)
            by_expert = by_expert * tokens_mask.transpose(0, 1)
        return x, by_expert

    def _choose_by_column(
        self, x: Tensor, logits: Tensor, columns: Tensor
    ) -> tuple[Tensor, Tensor]:
        """As ``choose`` without ``scale``: weights in the dtype of the logits, both [top_k, T].

        ``columns`` [E, T] are the logits.
        """
        if self.function is not None:
            weights, ids = self.function(
                hidden_states=x, gating_output=logits, topk=self.top_k, renormalize=self.renormalize
            )
            return weights.to(logits.dtype).transpose(0, 1), ids.long().transpose(0, 1)
        if self.scoring == "softmax" and self.bias is None:
            if not self.renormalize:
                weights, ids = torch.topk(functional.softmax(columns, dim=0), self.top_k, dim=0)
                return weights, ids
            best, ids = torch.topk(columns, self.top_k, dim=0)
            return functional.softmax(best, dim=0), ids
        return self._best_by_column(SCORINGS[self.scoring](columns, 0))

    def _best_by_column(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [E, T]; returns weights of the same dtype and ids [top_k, T]."""
        biased = scores if self.bias is None else scores + self.bias.unsqueeze(1)
        ids = torch.topk(biased, self.top_k, dim=0)[1]
        return self._normalised(scores.gather(0, ids)), ids

    def _normalised(self, weights: Tensor) -> Tensor:
        if not self.renormalize:
            return weights
        return weights / weights.sum(dim=0, keepdim=True).clamp_min(1e-20)

    def _spread_of_groups(self, logits: Tensor) -> Tensor:
        """logits [T, E] to the weights [E, T] of experts in the groups open to a row."""
        rows, count = logits.shape
        size = count // self.groups
        # A softmax of the chosen gives what the chosen of a softmax give, made to sum to one.
        late = self.scoring == "softmax" and self.bias is None and self.renormalize
        scores = logits if late else SCORINGS[self.scoring](logits, -1)
        by_group = scores.reshape(rows, self.groups, size)
        if self.bias is None:
            speakers = by_group.max(dim=2)[0]
        else:
            biased = (scores + self.bias.unsqueeze(0)).reshape(rows, self.groups, size)
            speakers = torch.topk(biased, 2, dim=2)[0].sum(dim=2)
        groups = torch.topk(speakers, self.top_groups, dim=1)[1]
        index = groups.unsqueeze(-1).expand(-1, -1, size)
        opened = torch.gather(by_group, 1, index)
        if self.bias is not None:
            closed = torch.full(by_group.shape, float("-inf"), dtype=by_group.dtype)
            columns = closed.scatter(1, index, opened).permute(1, 2, 0).reshape(count, rows)
            weights, ids = self._best_by_column(columns)
            return _table(columns, weights, ids)
        columns = opened.permute(1, 2, 0).reshape(-1, rows)
        best, ids = torch.topk(columns, self.top_k, dim=0)
        weights = functional.softmax(best, dim=0) if late else self._normalised(best)
        by_row = _table(columns, weights, ids).reshape(self.top_groups, size, rows).permute(2, 0, 1)
        zeros = torch.zeros(by_group.shape, dtype=by_row.dtype)
        placed = zeros.scatter(1, index, by_row)
        return placed.permute(1, 2, 0).reshape(count, rows)


def _table(scores: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
    """weights and ids [k, T] in a table like ``scores`` [E, T] of zeros."""
    table = torch.zeros_like(scores)
    # The call's result is left unused, as in the chain that the compiler knows.
    table.scatter_(0, ids, weights)
    return table


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
