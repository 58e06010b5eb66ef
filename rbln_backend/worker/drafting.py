"""Drafts of the next step, proposed for each request while they pay."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import DraftTokenIds
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rbln_backend.buckets import BucketTable, VerifyTable
from rbln_backend.collectives import groups, value_of_first_rank
from rbln_backend.core import GraphSpec, Phase, StepBatch, StepOutputs
from rbln_backend.reports.metrics import DraftCounts, MetricsBoard
from rbln_backend.speculation.drafter import (
    DraftBudget,
    DraftedRequest,
    DraftSettings,
    PredictionFirst,
)
from rbln_backend.speculation.text_drafts import make_drafter
from rbln_backend.worker.batch import RequestBatches
from rbln_backend.worker.graph_factory import GraphRequest
from rbln_backend.worker.graph_set import GraphDispatch


@dataclass(slots=True)
class _Decoding:
    """A request with sampled tokens."""

    state: CachedRequestState
    is_drafted: bool
    """False if its drafts are off."""


class Drafting:
    """Proposes drafts from the tokens of each step: over a drafter on the host, where one replies.

    A draft model's graphs have collectives. So every rank drafts with one, from the same tokens,
    after the same steps. While drafts do not pay, those of clients' predictions are still tried:
    they have a budget of their own.
    """

    def __init__(
        self,
        config: VllmConfig,
        batches: RequestBatches,
        board: MetricsBoard,
        *,
        table: VerifyTable,
        source: DraftSource | None,
    ) -> None:
        """``table``: the compiled sizes. ``source``: the draft model's graphs, if there is one."""
        speculation = config.speculative_config
        assert speculation is not None
        self._model = None if source is None else ModelDrafter(source)
        # It prefers a client's prediction.
        self._drafter = PredictionFirst(self._model or make_drafter(speculation))
        # Without a draft model this is the only rank that drafts.
        decide = partial(value_of_first_rank, None if source is None else groups().get("tp"))
        most = speculation.num_speculative_tokens
        self._budget = DraftBudget(most, decide)
        self._predicted = DraftBudget(most, decide)
        """The budget of predictions alone."""
        self._used = self._budget
        """Counts the check of the next step's drafts."""
        self.by_step = config.parallel_config.pipeline_parallel_size > 1
        """The result of a step has the drafts of its requests, because other pipeline stages run
        steps of other requests; else the engine takes those of all."""
        self._requests = batches.requests
        self._table, self._counts = table, DraftCounts(board, table)
        self._max_model_len = config.model_config.max_model_len
        self._begun: dict[str, _Decoding] = {}
        # Requests to draft for: those of the latest decode step, and of prefill steps since.
        self._decoding: list[str] = []
        self._sampled = False
        self._most = 0
        """Most drafts of a request that the next step checks."""

    def start_step(self, scheduled: SchedulerOutput) -> None:
        """Remove finished and preempted requests. Called before a step.

        An answer is complete if its last token ends it, else aborted.
        """
        self._sampled = False
        gone = scheduled.finished_req_ids | (scheduled.preempted_req_ids or set())
        if gone:
            self._decoding = [name for name in self._decoding if name not in gone]
        if self._model is not None:
            for name in gone:
                self._model.forget(name)
        for name in scheduled.finished_req_ids & self._begun.keys():
            begun = self._begun.pop(name)
            if begun.is_drafted:
                self._drafter.end(name, finished=self._has_ended(begun.state))

    def end_step(
        self,
        batch: StepBatch,
        outputs: StepOutputs,
        token_ids: Sequence[Sequence[int]],
        seconds: float,
    ) -> None:
        """Record the tokens sampled for each request. Called after a step.

        ``seconds``: from the scheduler's output to the sampled tokens.
        """
        self._sampled = True
        names = batch.input_batch.req_ids
        if batch.phase.takes_chunk:
            self._decoding += names
        else:
            self._decoding = list(names)
            self._count(batch, sum(map(len, token_ids)), seconds)
        for name, tokens in zip(names, token_ids, strict=True):
            begun = self._begun.get(name) or self._begin(self._requests[name])
            if begun.is_drafted:
                self._drafter.extend(name, tokens)
        # How many drafts of a request the next step checks, and which.
        self._most, requests = 0, len(self._running())
        sizes = self._table.sizes(requests) if requests else ()
        if len(sizes) >= 2:
            (bucket, _), *_, (_, longest) = sizes
            self._used = self._predicted if self._budget.is_paused(bucket) else self._budget
            self._most = min(self._used.drafts(bucket), longest - 1)
        if self._model is not None:
            going_on = [
                row
                for row, name in enumerate(names)
                if token_ids[row] and not self._has_ended(self._begun[name].state)
            ]
            self._model.draft(
                self._ended(batch, outputs, token_ids),
                going_on if self._most and self._used is self._budget else (),
            )

    def end_chunk(self, batch: StepBatch, outputs: StepOutputs) -> None:
        """Called instead of ``end_step`` after a chunk that ends no prompt."""
        if self._model is not None:
            self._model.draft(self._ended(batch, outputs, [()] * batch.num_reqs))

    def take(self) -> DraftTokenIds | None:
        """Return drafts of the decoding requests, None where the latest step sampled nothing.

        With ``by_step``, those of the step alone.
        """
        if not self._sampled:
            return None
        drafted = [request.state for request in self._running() if request.is_drafted]
        if self.by_step:
            self._decoding = []
        return DraftTokenIds(
            [state.req_id for state in drafted], [self._propose(state) for state in drafted]
        )

    def _running(self) -> list[_Decoding]:
        begun = [self._begun[name] for name in self._decoding]
        return [request for request in begun if not self._has_ended(request.state)]

    def _ended(
        self, batch: StepBatch, outputs: StepOutputs, token_ids: Sequence[Sequence[int]]
    ) -> EndedStep:
        names = batch.input_batch.req_ids
        states = [*(self._requests[name] for name in names), *batch.decode_prefill]
        return EndedStep(batch, states, outputs, token_ids)

    def _count(self, batch: StepBatch, tokens: int, seconds: float) -> None:
        size = self._table.find(batch.num_reqs, batch.length)
        drafting_s = self._model.seconds if self._model is not None else 0.0
        if batch.phase is not Phase.VERIFY and not drafting_s:
            self._budget.plain(size[0], seconds)
            self._predicted.plain(size[0], seconds)
            return
        gain = self._used.checked(size[0], seconds + drafting_s, tokens / batch.num_reqs)
        if batch.phase is Phase.VERIFY:
            self._counts.record(
                size,
                checked=sum(map(len, batch.drafts)),
                accepted=tokens - batch.num_reqs,
                gain=gain,
            )

    def _propose(self, state: CachedRequestState) -> list[int]:
        limit = min(self._most, self._tokens_left(state) - 1)
        if limit < 1:
            return []
        if self._used is self._predicted:
            return self._drafter.predicted(state.req_id, limit)
        return self._drafter.propose(state.req_id, limit)

    def _tokens_left(self, state: CachedRequestState) -> int:
        """Return the tokens that may still be sampled for the request."""
        params = _sampling(state)
        left = self._max_model_len - state.num_tokens
        if params.max_tokens is not None:
            left = min(left, params.max_tokens - len(state.output_token_ids))
        return left

    def _has_ended(self, state: CachedRequestState) -> bool:
        if self._tokens_left(state) < 1:
            return True
        # Or its latest token is a stop token that may end it.
        params, tokens = _sampling(state), state.output_token_ids
        may_end = len(tokens) >= max(params.min_tokens, 1)
        return may_end and tokens[-1] in params.all_stop_token_ids

    def _begin(self, state: CachedRequestState) -> _Decoding:
        settings = DraftSettings.of(_sampling(state).extra_args)
        begun = _Decoding(state, is_drafted=not settings.off)
        self._begun[state.req_id] = begun
        adapter = state.lora_request
        if not settings.off:
            self._drafter.begin(
                DraftedRequest(
                    request_id=state.req_id,
                    prompt=state.prompt_token_ids or (),
                    prediction=settings.prediction,
                    # Other weights may be loaded under the same name later.
                    adapter=f"{adapter.lora_name}:{adapter.lora_int_id}" if adapter else None,
                    key=settings.key,
                )
            )
        return begun


def _sampling(state: CachedRequestState) -> SamplingParams:
    assert state.sampling_params is not None, "models that pool do not draft"
    return state.sampling_params


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

    def follow(self, step: EndedStep) -> None:
        """Take a step after which nothing is drafted."""

    def forget(self, request_id: str) -> None:
        """Drop a request that has finished or lost its blocks."""


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
        for row, tokens in zip(rows, self._source(step, rows), strict=True):
            self._drafts[names[row]] = tokens
        if not step.batch.phase.takes_chunk:
            self.seconds = time.perf_counter() - started

    def begin(self, request: DraftedRequest) -> None:
        self._drafts[request.request_id] = []

    def extend(self, request_id: str, tokens: Sequence[int]) -> None:
        if tokens:
            self._drafts[request_id] = []

    def propose(self, request_id: str, limit: int) -> list[int]:
        return self._drafts[request_id][:limit]

    def end(self, request_id: str, finished: bool) -> None:  # noqa: ARG002
        del self._drafts[request_id]

    def forget(self, request_id: str) -> None:
        """Drop what the draft model has not read of a request; see ``DraftSource``."""
        self._source.forget(request_id)


def _last_rows(step: EndedStep, rows: Sequence[int]) -> Tensor:
    """Return [n, H]: the hidden state of which each request's latest token was sampled."""
    batch, hidden = step.batch, step.hidden()
    if batch.phase is Phase.VERIFY:
        positions = torch.tensor([(row, len(step.token_ids[row]) - 1) for row in rows])
        return hidden[positions[:, 0], positions[:, 1]]
    if not batch.phase.takes_chunk:
        return hidden[list(rows)]
    last = [end - 1 for end in accumulate(batch.counts)]
    return hidden[[last[row] for row in rows]]
