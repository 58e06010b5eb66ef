"""Runs of a draft model: of heads, or of a layer whose KV cache follows the served model's."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rbln_backend.buckets import get_padded_size
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.settings import compiled_sizes, configured
from rbln_backend.speculation.text_drafts import get_draft_model
from rbln_backend.worker.draft_model import draft_model, reads_layers
from rbln_backend.worker.drafting import DraftHeads, DraftSource, EndedStep
from rbln_backend.worker.graph_factory import GraphRequest
from rbln_backend.worker.graph_set import GraphDispatch, draft_specs, get_spec
from rbln_backend.worker.inputs import DecodeRows, IntArray, KvGroup, StepInputs, padded_blocks


class DraftPiece(NamedTuple):
    """Tokens of a request that a run reads."""

    state: CachedRequestState
    start: int
    """The first slot that they fill."""
    tokens: list[int]
    hidden: Tensor
    """[n, H]: one hidden state for each token."""

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)


class FirstDraft(NamedTuple):
    """A request after a run has read its tokens."""

    state: CachedRequestState
    end: int
    """Slots of the draft model's cache that are filled."""
    token: int
    """The first draft."""
    hidden: Tensor
    """[H]: the hidden state of which it was taken, as in ``DraftPiece``."""


class _Buffers(NamedTuple):
    """The inputs of one graph."""

    step: StepInputs
    last_rows: Tensor
    """[R] int64: the row of each request of which a token is drafted."""
    hidden: Tensor
    """[tokens, H]."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {**self.step.tensors, "hidden": self.hidden, "last_rows": self.last_rows}

    def fill_rows(self, pieces: Sequence[DraftPiece], firsts: Sequence[int]) -> None:
        """Draft from the last token of each piece, which begins at its row in ``firsts``."""
        self.hidden.zero_()
        self.last_rows.zero_()
        for row, (first, piece) in enumerate(zip(firsts, pieces, strict=True)):
            end = first + len(piece.tokens)
            self.last_rows[row] = end - 1
            self.hidden[first:end] = piece.hidden


class DraftRuns:
    """The graphs of a draft model, and their runs over pieces of requests."""

    def __init__(
        self,
        config: VllmConfig,
        groups: Sequence[KvGroup],
        make_inputs: Callable[[GraphSpec], StepInputs],
        dispatch: GraphDispatch,
        token_offsets: Tensor | None,
    ) -> None:
        """``token_offsets`` [V] int64: the served model's token less the draft model's.

        None: they are the same.
        """
        sizes, speculation = compiled_sizes(config).drafted, get_draft_model(config)
        assert sizes is not None and sizes.length is not None and speculation is not None
        hidden_size: int = speculation.draft_model_config.get_hidden_size()
        dtype: Any = config.model_config.dtype
        self._sizes, self._dispatch = sizes, dispatch
        self._token_offsets = token_offsets
        self._prompts = configured(config).chunk_prompts
        """Most prompts of a chunk."""
        self._widths = [group.width for group in groups]
        """Blocks of a request by KV cache group."""
        self._max_model_len = config.model_config.max_model_len
        self.length = sizes.length
        """Most tokens of a request in ``read_rows``: one more than drafts."""
        self._buffers = {
            spec: _Buffers(
                make_inputs(spec),
                torch.arange(spec.requests),
                torch.zeros(spec.batch_size * spec.query_len, hidden_size, dtype=dtype),
            )
            for spec in draft_specs(sizes, self._prompts)
        }
        self.graphs: Mapping[GraphSpec, GraphRequest] = {
            spec: GraphRequest(spec, buffers.tensors, buffers.step.metadata)
            for spec, buffers in self._buffers.items()
        }

    def has_room(self, end: int) -> bool:
        """Return True if ``length`` tokens after ``end`` are within the context."""
        return end + self.length <= self._max_model_len

    def read_chunks(self, pieces: Sequence[DraftPiece]) -> None:
        """Read pieces in as few chunks as hold them, longer ones in several."""
        most, packed = self._sizes.chunks.largest, list[DraftPiece]()
        for piece in pieces:
            for first in range(0, len(piece.tokens), most):
                part = DraftPiece(
                    piece.state,
                    piece.start + first,
                    piece.tokens[first : first + most],
                    piece.hidden[first : first + most],
                )
                more = [*packed, part]
                if packed and (_size(more) > most or len(more) > self._prompts):
                    self.read_chunk(packed)
                    more = [part]
                packed = more
        if packed:
            self.read_chunk(packed)

    def read_chunk(self, pieces: Sequence[DraftPiece]) -> list[FirstDraft]:
        size = self._sizes.chunks.find(_size(pieces))
        spec = get_spec(Phase.DRAFT_PREFILL, size, self._prompts)
        buffers = self._buffers[spec]
        buffers.step.fill_prefill(
            [np.array(piece.tokens, dtype=np.int64) for piece in pieces],
            np.array([piece.start for piece in pieces], dtype=np.int64),
            self._blocks([piece.state for piece in pieces]),
        )
        counts = [len(piece.tokens) for piece in pieces]
        buffers.step.fill_mask([sum(counts)])
        firsts = [end - n for end, n in zip(accumulate(counts), counts, strict=True)]
        return self._first_drafts(spec, pieces, firsts)

    def read_rows(self, pieces: Sequence[DraftPiece]) -> list[FirstDraft]:
        """Read 1 to ``length`` tokens of each request."""
        if not pieces:
            return []
        # An NPU's kernels get the longest context first.
        ordered = sorted(pieces, key=lambda piece: -piece.start)
        count = len(ordered)
        spec = GraphSpec.of(Phase.DRAFT, self._sizes.requests.find(count), self.length)
        buffers = self._buffers[spec]
        rows = DecodeRows(
            np.array([piece.tokens[0] for piece in ordered]),
            np.array([piece.start for piece in ordered]),
            self._blocks([piece.state for piece in ordered]),
        )
        buffers.step.fill_verify(rows, [piece.tokens[1:] for piece in ordered])
        buffers.step.fill_mask([count])
        return self._first_drafts(spec, ordered, range(0, count * self.length, self.length))

    def draft(
        self, read: Sequence[FirstDraft], request_ids: Collection[str]
    ) -> dict[str, list[int]]:
        """Return the drafts of ``request_ids`` by id: the first one, and those after it.

        None for requests that end with the context soon.
        """
        chosen = [
            first
            for first in read
            if first.state.req_id in request_ids and self.has_room(first.end)
        ]
        if not chosen:
            return {}
        ordered = sorted(chosen, key=lambda first: -first.end)
        positions = np.array([first.end for first in ordered])
        blocks = self._blocks([first.state for first in ordered])
        count = len(ordered)
        spec = GraphSpec.of(Phase.DRAFT, self._sizes.requests.find(count))
        buffers = self._buffers[spec]
        buffers.step.fill_mask([count])
        tokens = torch.tensor([first.token for first in ordered])
        hidden = torch.stack([first.hidden for first in ordered])
        drafted = [tokens]
        for _ in range(self.length - 2):
            buffers.step.fill_decode(tokens.numpy(), positions, blocks)
            buffers.hidden[:count] = hidden
            buffers.hidden[count:] = 0
            tokens, hidden = self._run(spec, count)
            drafted.append(tokens)
            positions = positions + 1
        drafts = torch.stack([first.long() for first in drafted], dim=1).tolist()
        return {first.state.req_id: row for first, row in zip(ordered, drafts, strict=True)}

    def _first_drafts(
        self, spec: GraphSpec, pieces: Sequence[DraftPiece], firsts: Sequence[int]
    ) -> list[FirstDraft]:
        self._buffers[spec].fill_rows(pieces, firsts)
        tokens, hidden = self._run(spec, len(pieces))
        return [
            FirstDraft(piece.state, piece.end, int(tokens[n]), hidden[n])
            for n, piece in enumerate(pieces)
        ]

    def _run(self, spec: GraphSpec, count: int) -> tuple[Tensor, Tensor]:
        """Return the drafts [n] and the hidden states [n, H]; the next run leaves them."""
        tokens, hidden = (output.cpu()[:count].clone() for output in self._dispatch.get(spec).run())
        offsets = self._token_offsets
        return tokens if offsets is None else tokens + offsets[tokens], hidden

    def _blocks(self, states: Sequence[CachedRequestState]) -> list[IntArray]:
        """Return the blocks of each request by KV cache group."""
        return [
            padded_blocks([state.block_ids[group] for state in states], width)
            for group, width in enumerate(self._widths)
        ]


def _size(pieces: Sequence[DraftPiece]) -> int:
    """Return the tokens of the smallest chunk that holds ``pieces``."""
    return get_padded_size(sum(len(piece.tokens) for piece in pieces), len(pieces))


def get_tokens(state: CachedRequestState, start: int, end: int) -> list[int]:
    """Return the tokens ``start`` to ``end`` of a request, 0 for one that is open."""
    prompt, answer = state.prompt_token_ids or [], state.output_token_ids
    tokens = [*prompt[start:end]]
    tokens += answer[max(start - len(prompt), 0) : max(end - len(prompt), 0)]
    return tokens + [0] * (end - start - len(tokens))


# `DraftLayer`: a layer of EAGLE or EAGLE-3, whose KV cache follows the served model's by token.
#
# Slot n of its cache is computed from token n + 1 and the hidden state of token n. It is in the
# blocks of the served model's layers, so that a prefix hit finds it as well. After each step the
# layer reads what the step has computed, all requests of it; then it drafts one token after another
# for those that go on, from its own hidden states. Their slots are written again once the tokens
# are known. Of decode steps after which nothing is drafted, the hidden states wait and are read
# together before the next drafts.


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
        for state, hidden, count in zip(step.states, by_token, step.counts, strict=True):
            start = state.num_computed_tokens
            if self._runs.has_room(start):
                unread = self._unread.setdefault(state.req_id, _Unread(start, []))
                unread.parts.append(hidden[:count])

    def forget(self, request_id: str) -> None:
        self._unread.pop(request_id, None)

    def _hidden(self, step: EndedStep) -> Tensor:
        return step.hidden(reads_layers=self._reads_layers)

    def _read_chunk(self, step: EndedStep) -> list[FirstDraft]:
        self._catch_up(step.states)
        counts = step.counts
        hidden = self._hidden(step)[: sum(counts)].split(counts)
        starts = [state.num_computed_tokens for state in step.states]
        return self._runs.read_chunk(
            [_piece(*piece) for piece in zip(step.states, starts, hidden, strict=True)]
        )

    def _catch_up(self, states: Sequence[CachedRequestState]) -> None:
        unread = [(state, self._unread.pop(state.req_id, None)) for state in states]
        self._runs.read_chunks(
            [_piece(state, rest.start, torch.cat(rest.parts)) for state, rest in unread if rest]
        )

    def _read_step(self, step: EndedStep) -> list[FirstDraft]:
        """Read the tokens that each request got in a decode step, and at least one."""
        by_token = _by_token(self._hidden(step))
        pieces = [
            _piece(state, state.num_computed_tokens, by_token[row, :count])
            for row, (state, count) in enumerate(zip(step.states, step.counts, strict=True))
            if self._runs.has_room(state.num_computed_tokens)
        ]
        self._catch_up([piece.state for piece in pieces])
        return self._runs.read_rows(pieces)


def _piece(state: CachedRequestState, start: int, hidden: Tensor) -> DraftPiece:
    """Return hidden states [n, H] from slot ``start`` on, each with the token after it."""
    tokens = get_tokens(state, start + 1, start + 1 + len(hidden))
    return DraftPiece(state, start, tokens, hidden)


def _by_token(hidden: Tensor) -> Tensor:
    """Return the hidden states of a decode step, [bucket, H] without drafts, as [bucket, n, H]."""
    return hidden if hidden.dim() == 3 else hidden[:, None]


def make_source(
    config: VllmConfig,
    groups: Sequence[KvGroup],
    make_inputs: Callable[[GraphSpec], StepInputs],
    dispatch: GraphDispatch,
    served: nn.Module,
) -> DraftSource | None:
    """Return the draft model's graphs, None without one; ``make_inputs``: buffers of a step.

    The draft model is a part of ``served``.
    """
    model, sizes = config.model_config, compiled_sizes(config).drafted
    if sizes is None:
        return None
    if sizes.length is None:
        dtype: Any = model.dtype
        return DraftHeads(model.get_hidden_size(), dtype, sizes.requests, dispatch)
    draft = draft_model(served)
    offsets = getattr(draft, "draft_id_to_target_id", None)
    runs = DraftRuns(config, groups, make_inputs, dispatch, offsets)
    return DraftLayer(runs, reads_layers=reads_layers(draft))
