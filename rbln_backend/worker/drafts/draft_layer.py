"""`DraftLayer`: a layer of EAGLE or EAGLE-3, whose KV cache follows the served model's by token.

Slot n of its cache is computed from token n + 1 and the hidden state of token n. It is in the
blocks of the served model's layers, so that a prefix hit finds it as well. After each step the
layer reads what the step has computed, all requests of it; then it drafts one token after another
for those that go on, from its own hidden states. Their slots are written again once the tokens are
known. Of decode steps after which nothing is drafted, the hidden states wait and are read together
before the next drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rbln_backend.core import GraphSpec
from rbln_backend.vllm_compat.surface import CachedRequestState
from rbln_backend.worker.drafts.draft_runs import DraftPiece, DraftRuns, FirstDraft, tokens_of
from rbln_backend.worker.drafts.model_drafter import EndedStep
from rbln_backend.worker.graphs.factory import GraphRequest


class _Unread(NamedTuple):
    """Hidden states of a request that the layer has not read, of steps in order."""

    start: int
    """Slot of the first one."""
    parts: list[Tensor]
    """[n, H] of each step."""


class DraftLayer:
    """A ``DraftSource`` over a layer."""

    def __init__(self, runs: DraftRuns, *, reads_layers: bool) -> None:
        """``reads_layers``: see ``EndedStep.hidden``."""
        self._runs, self._reads_layers = runs, reads_layers
        self.graphs: Mapping[GraphSpec, GraphRequest] = runs.graphs
        self._unread: dict[str, _Unread] = {}

    @torch.inference_mode()
    def __call__(self, step: EndedStep, rows: Sequence[int]) -> list[list[int]]:
        """As ``DraftSource``; no drafts for requests that end with the context soon."""
        read = self._read_chunk(step) if step.batch.phase.takes_chunk else self._read_step(step)
        names = [step.states[row].req_id for row in rows]
        drafts = self._runs.draft(read, set(names))
        return [drafts.get(name, []) for name in names]

    @torch.inference_mode()
    def follow(self, step: EndedStep) -> None:
        """As ``DraftSource``: read a chunk; the hidden states of a decode step wait."""
        if step.batch.phase.takes_chunk:
            self._read_chunk(step)
            return
        by_token = _by_token(self._hidden(step)[: len(step.states)]).cpu().clone()
        for state, own, count in zip(step.states, by_token, step.counts, strict=True):
            start = state.num_computed_tokens
            if self._runs.has_room(start):
                unread = self._unread.setdefault(state.req_id, _Unread(start, []))
                unread.parts.append(own[:count])

    def forget(self, request_id: str) -> None:
        """As ``DraftSource``."""
        self._unread.pop(request_id, None)

    def _hidden(self, step: EndedStep) -> Tensor:
        return step.hidden(reads_layers=self._reads_layers)

    def _read_chunk(self, step: EndedStep) -> list[FirstDraft]:
        """Read a chunk of prompts."""
        self._catch_up(step.states)
        counts = step.counts
        hidden = self._hidden(step)[: sum(counts)].split(counts)
        starts = [state.num_computed_tokens for state in step.states]
        return self._runs.read_chunk(
            [_piece(*own) for own in zip(step.states, starts, hidden, strict=True)]
        )

    def _catch_up(self, states: Sequence[CachedRequestState]) -> None:
        """Read the unread tokens of requests."""
        found = [(state, self._unread.pop(state.req_id, None)) for state in states]
        self._runs.read_chunks(
            [_piece(state, own.start, torch.cat(own.parts)) for state, own in found if own]
        )

    def _read_step(self, step: EndedStep) -> list[FirstDraft]:
        """Read the tokens that each request got in a decode step, and at least one."""
        by_token = _by_token(self._hidden(step))
        own = [
            _piece(state, state.num_computed_tokens, by_token[row, :count])
            for row, (state, count) in enumerate(zip(step.states, step.counts, strict=True))
            if self._runs.has_room(state.num_computed_tokens)
        ]
        self._catch_up([piece.state for piece in own])
        return self._runs.read_rows(own)


def _piece(state: CachedRequestState, start: int, hidden: Tensor) -> DraftPiece:
    """Return hidden states [n, H] from slot ``start`` on, each with the token after it."""
    tokens = tokens_of(state, start + 1, start + 1 + len(hidden))
    return DraftPiece(state, start, tokens, hidden)


def _by_token(hidden: Tensor) -> Tensor:
    """Return the hidden states of a decode step, [bucket, H] without drafts, as [bucket, n, H]."""
    return hidden if hidden.dim() == 3 else hidden[:, None]
