"""`WholeDraftModel`: a second model of the same vocabulary, whose KV cache follows by token.

Slot n of its cache is computed from token n. It is in the blocks of the served model's layers,
so that a prefix hit finds it as well. After each step it reads what the step has computed and
sampled; then it drafts one token after another for the requests that go on, whose slots are
written again once the tokens are known. Tokens of decode steps after which nothing is drafted are
read before the next drafts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from rbln_backend.core import GraphSpec
from rbln_backend.vllm_compat.surface import CachedRequestState
from rbln_backend.worker.drafts.draft_runs import DraftPiece, DraftRuns, FirstDraft, tokens_of
from rbln_backend.worker.drafts.model_drafter import EndedStep
from rbln_backend.worker.graphs.factory import GraphRequest


class WholeDraftModel:
    """A ``DraftSource`` over a whole model."""

    def __init__(self, runs: DraftRuns) -> None:
        self._runs = runs
        self.graphs: Mapping[GraphSpec, GraphRequest] = runs.graphs
        self._filled: dict[str, int] = {}
        """Slots by request that are computed from its tokens."""

    @torch.inference_mode()
    def __call__(self, step: EndedStep, rows: Sequence[int]) -> list[list[int]]:
        """As ``DraftSource``; no drafts for requests that end with the context soon."""
        ends = self._ends(step)
        going_on = [step.states[row] for row in rows]
        names = [state.req_id for state in going_on]
        states = step.states
        if step.batch.phase.takes_chunk:
            self._read_chunks(states, ends)
            states = going_on
        # Prompts that are computed beside a decode step have no sampled token.
        sampled = {
            s.req_id for s, tokens in zip(step.states, step.token_ids, strict=False) if tokens
        }
        known = {name: end + (name in sampled) for name, end in ends.items()}
        drafts = self._runs.draft(self._read_rows(states, ends, known), set(names))
        return [drafts.get(name, []) for name in names]

    @torch.inference_mode()
    def follow(self, step: EndedStep) -> None:
        """As ``DraftSource``: read a chunk; the tokens of a decode step wait."""
        ends = self._ends(step)
        if step.batch.phase.takes_chunk:
            self._read_chunks(step.states, ends)

    def forget(self, request_id: str) -> None:
        """As ``DraftSource``."""
        self._filled.pop(request_id, None)

    def _ends(self, step: EndedStep) -> dict[str, int]:
        """Return the slots of each request that a step has filled in the served model's cache.

        Those before a request's first step are of a prefix hit.
        """
        for state in step.states:
            self._filled.setdefault(state.req_id, state.num_computed_tokens)
        return {
            state.req_id: state.num_computed_tokens + count
            for state, count in zip(step.states, step.counts, strict=True)
        }

    def _read_chunks(self, states: Sequence[CachedRequestState], ends: Mapping[str, int]) -> None:
        """Read the unread tokens of requests before ``ends``."""
        pieces = [self._take_unread(state, ends[state.req_id]) for state in states]
        self._runs.read_chunks([piece for piece in pieces if piece.tokens])

    def _read_rows(
        self,
        states: Sequence[CachedRequestState],
        ends: Mapping[str, int],
        known: Mapping[str, int],
    ) -> list[FirstDraft]:
        """Read the unread tokens of requests before ``known``, the sampled one after ``ends``."""
        fit = [state for state in states if self._runs.has_room(ends[state.req_id])]
        length, filled = self._runs.length, self._filled
        behind = [s for s in fit if known[s.req_id] - filled[s.req_id] > length]
        self._read_chunks(behind, ends)
        pieces = [self._take_unread(state, known[state.req_id]) for state in fit]
        return self._runs.read_rows([piece for piece in pieces if piece.tokens])

    def _take_unread(self, state: CachedRequestState, end: int) -> DraftPiece:
        """Return the unread tokens of a request before ``end``, which the caller reads."""
        start = self._filled[state.req_id]
        self._filled[state.req_id] = max(start, end)
        return DraftPiece(state, start, tokens_of(state, start, max(start, end)))
