"""Drafts of a draft model: computed after each step, from its tokens or their hidden states."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.core import GraphSpec, Phase, StepBatch, StepOutputs
from rbln_backend.speculation.drafter import DraftedRequest
from rbln_backend.vllm_compat.surface import CachedRequestState
from rbln_backend.worker.graphs.dispatch import GraphDispatch
from rbln_backend.worker.graphs.factory import GraphRequest

HIDDEN = 1
"""Place of the hidden states in a step's outputs."""


class EndedStep(NamedTuple):
    """A step whose tokens are known."""

    batch: StepBatch
    states: Sequence[CachedRequestState]
    """Of all its rows, those of chunks beside a decode step last."""
    outputs: StepOutputs
    token_ids: Sequence[Sequence[int]]
    """The tokens sampled for each request of the batch, with which the states end."""

    def hidden(self, *, reads_layers: bool = False) -> Tensor:
        """Return hidden states [L, H] of a chunk, [bucket, H], or [bucket, length, H] in VERIFY.

        ``reads_layers``: those of several layers, combined, which prefill graphs return behind
        the others.
        """
        return self.outputs[HIDDEN + (reads_layers and self.batch.phase.takes_chunk)]

    @property
    def counts(self) -> list[int]:
        """The tokens that the step has computed of each of ``states``."""
        if self.batch.phase.takes_chunk:
            return list(self.batch.counts)
        counts = [max(len(tokens), 1) for tokens in self.token_ids]
        return counts + [1] * (len(self.states) - len(counts))


class DraftSource(Protocol):
    """The graphs of a draft model, run after a step."""

    graphs: Mapping[GraphSpec, GraphRequest]
    """Graph requests, by spec."""

    def __call__(self, step: EndedStep, rows: Sequence[int]) -> list[list[int]]:
        """Return the drafts of ``rows`` of a step."""
        ...

    def follow(self, step: EndedStep) -> None:
        """Take a step after which nothing is drafted."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop a request that has finished or lost its blocks."""
        ...


class DraftHeads:
    """Medusa's heads: hidden [n, H] to drafts of n requests."""

    def __init__(
        self, hidden_size: int, dtype: torch.dtype, table: BucketTable, dispatch: GraphDispatch
    ) -> None:
        """``table``: requests of a run; ``dtype``: of hidden states."""
        self._table, self._dispatch = table, dispatch
        self.graphs: Mapping[GraphSpec, GraphRequest] = {
            (spec := GraphSpec.of(Phase.DRAFT, size)): GraphRequest(
                spec, {"hidden": torch.zeros(size, hidden_size, dtype=dtype)}, None
            )
            for size in table
        }

    @torch.inference_mode()
    def __call__(self, step: EndedStep, rows: Sequence[int]) -> list[list[int]]:
        """As ``DraftSource``."""
        drafts: list[list[int]] = []
        if not rows:
            return drafts
        hidden = _last_rows(step, rows)
        for piece in hidden.split(self._table.largest):
            count = len(piece)
            spec = GraphSpec.of(Phase.DRAFT, self._table.find(count))
            buffer = self.graphs[spec].inputs["hidden"]
            buffer[:count] = piece
            buffer[count:] = 0
            drafts += self._dispatch.get(spec).run()[0].cpu()[:count].tolist()
        return drafts

    def follow(self, step: EndedStep) -> None:
        """Do nothing: heads read the latest hidden state alone."""

    def forget(self, request_id: str) -> None:
        """Do nothing."""


class ModelDrafter:
    """A ``Drafter`` over a draft model: ``draft`` is called after each step.

    Drafts continue the latest token, so that they are dropped where another one has come.
    """

    def __init__(self, source: DraftSource) -> None:
        self.seconds = 0.0
        """Of the drafts after the latest step. 0 for none, and after a chunk: it is read anyway."""
        self._source = source
        self._drafts: dict[str, list[int]] = {}

    def draft(self, step: EndedStep, going_on: Sequence[int] = ()) -> None:
        """Compute drafts for the rows ``going_on`` of a step."""
        started = time.perf_counter()
        names = step.batch.input_batch.req_ids
        rows = [row for row in going_on if step.token_ids[row] and names[row] in self._drafts]
        self.seconds = 0.0
        if not rows:
            self._source.follow(step)
            return
        for row, own in zip(rows, self._source(step, rows), strict=True):
            self._drafts[names[row]] = own
        if not step.batch.phase.takes_chunk:
            self.seconds = time.perf_counter() - started

    def begin(self, request: DraftedRequest) -> None:
        """As ``Drafter``."""
        self._drafts[request.request_id] = []

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        """As ``Drafter``."""
        if tokens:
            self._drafts[request_id] = []

    def propose(self, request_id: str, limit: int) -> list[int]:
        """As ``Drafter``."""
        return self._drafts[request_id][:limit]

    def end(self, request_id: str, finished: bool) -> None:  # noqa: ARG002
        """As ``Drafter``."""
        del self._drafts[request_id]

    def forget(self, request_id: str) -> None:
        """Drop what the draft model has not read of a request; see ``DraftSource``."""
        self._source.forget(request_id)


def _last_rows(step: EndedStep, rows: Sequence[int]) -> Tensor:
    """Return [n, H]: the hidden state of which each request's latest token was sampled."""
    batch, hidden = step.batch, step.hidden()
    if batch.phase is Phase.VERIFY:
        places = torch.tensor([(row, len(step.token_ids[row]) - 1) for row in rows])
        return hidden[places[:, 0], places[:, 1]]
    if not batch.phase.takes_chunk:
        return hidden[list(rows)]
    last = [end - 1 for end in accumulate(batch.counts)]
    return hidden[[last[row] for row in rows]]
