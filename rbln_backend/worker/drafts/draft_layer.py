"""`DraftLayer`: a layer of EAGLE or EAGLE-3, whose KV cache follows the served model's by token.

Slot n of its cache is computed from token n + 1 and the hidden state of token n. It lies in the
blocks of the served model's layers, so that a prefix hit finds it as well. After each step the
layer reads what the step has computed, all requests of it; then it drafts one token after another
for those that go on, from its own hidden states. Their slots are written again once the tokens are
known. Of decode steps after which nothing is drafted, the hidden states wait and are read together
before the next drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rbln_backend.bucketing.chunk_plan import room_of
from rbln_backend.bucketing.engine_buckets import DraftSizes
from rbln_backend.core import GraphSpec, Phase
from rbln_backend.vllm_compat.surface import CachedRequestState
from rbln_backend.worker.drafts.model_drafter import EndedStep
from rbln_backend.worker.graphs.dispatch import GraphDispatch
from rbln_backend.worker.graphs.factory import GraphRequest
from rbln_backend.worker.graphs.warmup_plan import draft_specs, spec_of
from rbln_backend.worker.step.group_inputs import IntArray
from rbln_backend.worker.step.inputs import DecodeRows, StepInputs, padded_blocks


class LayerShape(NamedTuple):
    """The sizes of a draft layer and of its engine."""

    sizes: DraftSizes
    hidden_size: int
    """Of what the layer reads and returns."""
    dtype: torch.dtype
    """Of hidden states."""
    reads_layers: bool
    """As ``DraftSource``."""
    token_offsets: Tensor | None
    """[V] int64: the served model's token less the layer's own one; None: they are the same."""
    prompts: int
    """Most prompts of a chunk."""
    widths: Sequence[int]
    """Blocks of a request by KV cache group."""
    max_model_len: int


class _Buffers(NamedTuple):
    """The inputs of one graph."""

    step: StepInputs
    hidden: Tensor
    """[tokens, H]."""
    last_rows: Tensor
    """[R] int64: the row of each request of which a token is drafted."""

    def fill_hidden(self, parts: Sequence[Tensor], starts: Sequence[int]) -> None:
        """Place hidden states [n, H] of each request at its first row; draft from its last one."""
        self.hidden.zero_()
        self.last_rows.zero_()
        for place, (start, part) in enumerate(zip(starts, parts, strict=True)):
            end = start + len(part)
            self.hidden[start:end] = part
            self.last_rows[place] = end - 1


class _ReadRequest(NamedTuple):
    """A request after the layer has read its part of a step."""

    row: int
    state: CachedRequestState
    end: int
    """Slots of the layer's cache that are filled."""
    token: int
    """The first draft."""
    hidden: Tensor
    """[H]: the layer's hidden state of which it was taken."""


class _Unread(NamedTuple):
    """Hidden states of a request that the layer has not read, of steps in order."""

    start: int
    """Slot of the first one."""
    parts: list[Tensor]
    """[n, H] of each step."""


class _Piece(NamedTuple):
    """Hidden states of a request that the layer reads in a chunk."""

    state: CachedRequestState
    start: int
    hidden: Tensor
    """[n, H]"""

    @property
    def end(self) -> int:
        return self.start + len(self.hidden)


class DraftLayer:
    """A ``DraftSource`` over a layer."""

    def __init__(
        self,
        shape: LayerShape,
        make_inputs: Callable[[GraphSpec], StepInputs],
        dispatch: GraphDispatch,
    ) -> None:
        assert shape.sizes.length is not None
        self._shape, self._dispatch = shape, dispatch
        self.reads_layers = shape.reads_layers
        self._length = shape.sizes.length
        specs = draft_specs(shape.sizes, shape.prompts)
        self._buffers = {spec: _allocate(spec, shape, make_inputs) for spec in specs}
        self.graphs: Mapping[GraphSpec, GraphRequest] = {
            spec: GraphRequest(
                spec,
                {**own.step.tensors, "hidden": own.hidden, "last_rows": own.last_rows},
                own.step.metadata,
            )
            for spec, own in self._buffers.items()
        }
        self._unread: dict[str, _Unread] = {}

    @torch.inference_mode()
    def __call__(self, step: EndedStep, rows: Sequence[int]) -> list[list[int]]:
        """As ``DraftSource``; no drafts for requests that end with the context soon."""
        read = self._read_chunk(step) if step.batch.phase.takes_chunk else self._read_step(step)
        most = self._shape.max_model_len - self._length
        wanted = set(rows)
        drafts = self._draft([r for r in read if r.row in wanted and r.end <= most])
        return [drafts.get(row, []) for row in rows]

    @torch.inference_mode()
    def follow(self, step: EndedStep) -> None:
        """As ``DraftSource``: read a chunk; the hidden states of a decode step wait."""
        if step.batch.phase.takes_chunk:
            self._read_chunk(step)
            return
        by_token = _by_token(step.hidden[: len(step.states)]).cpu().clone()
        for state, own, count in zip(step.states, by_token, _counts(step), strict=True):
            start = state.num_computed_tokens
            if start + self._length <= self._shape.max_model_len:
                unread = self._unread.setdefault(state.req_id, _Unread(start, []))
                unread.parts.append(own[:count])

    def forget(self, request_id: str) -> None:
        """As ``DraftSource``."""
        self._unread.pop(request_id, None)

    def _read_chunk(self, step: EndedStep) -> list[_ReadRequest]:
        """Read a chunk of prompts."""
        self._catch_up(step.states)
        counts = list(step.batch.counts)
        hidden = step.hidden[: sum(counts)].split(counts)
        starts = [state.num_computed_tokens for state in step.states]
        pieces = [_Piece(*own) for own in zip(step.states, starts, hidden, strict=True)]
        tokens, layer = self._read(pieces)
        return [
            _ReadRequest(row, own.state, own.end, int(tokens[row]), layer[row])
            for row, own in enumerate(pieces)
        ]

    def _catch_up(self, states: Sequence[CachedRequestState]) -> None:
        """Read the unread tokens of requests, in as few chunks as hold them."""
        most, pieces = self._shape.sizes.chunks.largest, list[_Piece]()
        for state in states:
            unread = self._unread.pop(state.req_id, None)
            if unread is None:
                continue
            for part in torch.cat(unread.parts).split(most):
                own = _Piece(state, unread.start, part)
                unread = _Unread(own.end, [])
                if pieces and not self._fits([*pieces, own]):
                    self._read(pieces)
                    pieces = []
                pieces.append(own)
        if pieces:
            self._read(pieces)

    def _fits(self, pieces: Sequence[_Piece]) -> bool:
        size, count = _size(pieces), len(pieces)
        return size <= self._shape.sizes.chunks.largest and count <= self._shape.prompts

    def _read(self, pieces: Sequence[_Piece]) -> tuple[Tensor, Tensor]:
        """Read pieces as one chunk; return the next tokens [R] and the hidden states [R, H]."""
        size = self._shape.sizes.chunks.find(_size(pieces))
        spec = spec_of(Phase.DRAFT_PREFILL, size, self._shape.prompts)
        buffers = self._buffers[spec]
        texts = [_tokens(own.state, own.start, own.end) for own in pieces]
        buffers.step.fill_prefill(
            [np.array(text, dtype=np.int64) for text in texts],
            np.array([own.start for own in pieces], dtype=np.int64),
            self._blocks([own.state for own in pieces]),
        )
        buffers.step.fill_mask([sum(len(own.hidden) for own in pieces)])
        ends = accumulate(len(own.hidden) for own in pieces)
        firsts = [end - len(own.hidden) for own, end in zip(pieces, ends, strict=True)]
        buffers.fill_hidden([own.hidden for own in pieces], firsts)
        return self._run(spec)

    def _read_step(self, step: EndedStep) -> list[_ReadRequest]:
        """Read the tokens that each request got in a decode step, and at least one."""
        states, length, most = step.states, self._length, self._shape.max_model_len
        fit = [n for n, s in enumerate(states) if s.num_computed_tokens + length <= most]
        if not fit:
            return []
        self._catch_up([states[row] for row in fit])
        # An NPU's kernels get the longest context first.
        fit.sort(key=lambda row: -states[row].num_computed_tokens)
        own = [states[row] for row in fit]
        counts = _counts(step)
        starts = [state.num_computed_tokens for state in own]
        ends = [start + counts[row] for start, row in zip(starts, fit, strict=True)]
        texts = [_tokens(*args) for args in zip(own, starts, ends, strict=True)]
        spec = GraphSpec.of(Phase.DRAFT, self._shape.sizes.requests.find(len(fit)), length)
        buffers = self._buffers[spec]
        rows = DecodeRows(
            np.array([text[0] for text in texts]), np.array(starts), self._blocks(own)
        )
        buffers.step.fill_verify(rows, [text[1:] for text in texts])
        buffers.step.fill_mask([len(fit)])
        by_token = _by_token(step.hidden)
        parts = [by_token[row, : counts[row]] for row in fit]
        buffers.fill_hidden(parts, range(0, len(fit) * length, length))
        tokens, layer = self._run(spec)
        return [
            _ReadRequest(row, states[row], ends[place], int(tokens[place]), layer[place])
            for place, row in enumerate(fit)
        ]

    def _draft(self, requests: Sequence[_ReadRequest]) -> dict[int, list[int]]:
        """Return the drafts of each row: the first one, and those after it."""
        if not requests:
            return {}
        ordered = sorted(requests, key=lambda request: -request.end)
        places = np.array([request.end for request in ordered])
        blocks = self._blocks([request.state for request in ordered])
        count = len(ordered)
        spec = GraphSpec.of(Phase.DRAFT, self._shape.sizes.requests.find(count))
        buffers = self._buffers[spec]
        buffers.step.fill_mask([count])
        tokens = torch.tensor([request.token for request in ordered])
        hidden = torch.stack([request.hidden for request in ordered])
        drafted = [tokens]
        for _ in range(self._length - 2):
            buffers.step.fill_decode(tokens.numpy(), places, blocks)
            buffers.hidden[:count] = hidden
            buffers.hidden[count:] = 0
            tokens, hidden = (output[:count] for output in self._run(spec))
            drafted.append(tokens)
            places = places + 1
        drafts = torch.stack([own.long() for own in drafted], dim=1).tolist()
        return {request.row: own for request, own in zip(ordered, drafts, strict=True)}

    def _run(self, spec: GraphSpec) -> tuple[Tensor, Tensor]:
        """Return the drafts [R] and the layer's hidden states [R, H]; the next run leaves them."""
        tokens, hidden = self._dispatch.get(spec).run()
        tokens, hidden = tokens.cpu().clone(), hidden.cpu().clone()
        offsets = self._shape.token_offsets
        return tokens if offsets is None else tokens + offsets[tokens], hidden

    def _blocks(self, states: Sequence[CachedRequestState]) -> list[IntArray]:
        """Return the blocks of each request by KV cache group."""
        return [
            padded_blocks([state.block_ids[group] for state in states], width)
            for group, width in enumerate(self._shape.widths)
        ]


def _allocate(
    spec: GraphSpec, shape: LayerShape, make_inputs: Callable[[GraphSpec], StepInputs]
) -> _Buffers:
    tokens = spec.batch_size * spec.query_len
    return _Buffers(
        make_inputs(spec),
        torch.zeros(tokens, shape.hidden_size, dtype=shape.dtype),
        torch.arange(spec.requests),
    )


def _by_token(hidden: Tensor) -> Tensor:
    """Return the hidden states of a decode step, [bucket, H] without drafts, as [bucket, n, H]."""
    return hidden if hidden.dim() == 3 else hidden[:, None]


def _counts(step: EndedStep) -> list[int]:
    """Return the tokens that a decode step has computed of each request."""
    counts = [max(len(tokens), 1) for tokens in step.token_ids]
    return counts + [1] * (len(step.states) - len(counts))


def _size(pieces: Sequence[_Piece]) -> int:
    """Return the tokens of the smallest chunk that holds ``pieces``."""
    return room_of(sum(len(own.hidden) for own in pieces), len(pieces))


def _tokens(state: CachedRequestState, start: int, end: int) -> list[int]:
    """Return the tokens after those of the slots ``start`` to ``end``, 0 for one that is open."""
    prompt, answer = state.prompt_token_ids or [], state.output_token_ids
    first, last = start + 1, end + 1
    found = prompt[first:last]
    found = [*found, *answer[max(first - len(prompt), 0) : max(last - len(prompt), 0)]]
    return found + [0] * (end - start - len(found))
