"""Drafts of a draft model: computed after each step, from the hidden states of its last tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.core import GraphSpec, Phase, StepBatch, StepOutputs
from rbln_backend.speculation.drafter import Draft, DraftedRequest
from rbln_backend.worker.graphs.dispatch import GraphDispatch
from rbln_backend.worker.graphs.warmup_plan import draft_specs

_HIDDEN = 1
"""Place of the hidden states in a step's outputs."""


class DraftHeads:
    """The graphs of the draft model as a function: hidden [n, H] to drafts of n requests."""

    def __init__(
        self,
        hidden_size: int,
        dtype: torch.dtype,
        table: BucketTable | None,
        dispatch: GraphDispatch,
    ) -> None:
        """``table``: requests of a run, None without a draft model; ``dtype``: of hidden states."""
        self._table, self._dispatch = table, dispatch
        self.inputs: Mapping[GraphSpec, Mapping[str, Tensor]] = {
            spec: {"hidden": torch.zeros(spec.bucket, hidden_size, dtype=dtype)}
            for spec in draft_specs(table)
        }

    @torch.inference_mode()
    def __call__(self, hidden: Tensor) -> list[list[int]]:
        drafts: list[list[int]] = []
        assert self._table is not None
        for piece in hidden.split(self._table.largest):
            rows = len(piece)
            spec = GraphSpec.of(Phase.DRAFT, self._table.find(rows))
            buffer = self.inputs[spec]["hidden"]
            buffer[:rows] = piece
            buffer[rows:] = 0
            drafts += self._dispatch.get(spec).run()[0].cpu()[:rows].tolist()
        return drafts


class SampledRow(NamedTuple):
    """A request of a step, and the tokens that were sampled for it."""

    row: int
    request_id: str
    tokens: Sequence[int]


class ModelDrafter:
    """A ``Drafter`` over a draft model: ``draft`` is called after each step.

    Drafts continue the latest token, so that they are dropped where another one has come.
    """

    def __init__(self, heads: DraftHeads) -> None:
        self._heads = heads
        self._drafts: dict[str, list[int]] = {}

    def draft(self, batch: StepBatch, outputs: StepOutputs, sampled: Sequence[SampledRow]) -> None:
        """Compute drafts for the requests ``sampled`` of a step, which have begun."""
        rows = [row for row in sampled if row.tokens and row.request_id in self._drafts]
        if not rows:
            return
        drafts = self._heads(_last_rows(batch, outputs[_HIDDEN], rows))
        for row, own in zip(rows, drafts, strict=True):
            self._drafts[row.request_id] = own

    def begin(self, request: DraftedRequest) -> None:
        """As ``Drafter``."""
        self._drafts[request.request_id] = []

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """As ``Drafter``."""
        if tokens:
            self._drafts[request_id] = []

    def propose(self, request_id: str, limit: int) -> Draft:
        """As ``Drafter``."""
        return Draft(self._drafts[request_id][:limit], 0)

    def end(self, request_id: str, finished: bool) -> None:  # noqa: ARG002
        """As ``Drafter``."""
        del self._drafts[request_id]


def _last_rows(batch: StepBatch, hidden: Tensor, rows: Sequence[SampledRow]) -> Tensor:
    """Return [n, H]: the hidden state of which each request's latest token was sampled.

    hidden [L, H] of a chunk, [bucket, H], or [bucket, length, H] in VERIFY.
    """
    if batch.phase is Phase.VERIFY:
        places = torch.tensor([(row, len(tokens) - 1) for row, _, tokens in rows])
        return hidden[places[:, 0], places[:, 1]]
    ends: Iterator[int] = accumulate(batch.counts) if batch.phase.takes_chunk else iter(())
    last = [end - 1 for end in ends] or range(batch.num_reqs)
    return hidden[[last[row] for row, *_ in rows]]
