"""Drafts of the next step: proposed for each request, and cut to the length that pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from rbln_backend.bucketing.verify import Size, VerifyTable
from rbln_backend.core import Phase, StepBatch, StepOutputs
from rbln_backend.parallel.first_rank import FirstRank
from rbln_backend.reporting.draft_counts import DraftCounts
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.speculation.acceptance import Acceptance
from rbln_backend.speculation.choice import make_drafter
from rbln_backend.speculation.chooser import Chooser, StepChoice
from rbln_backend.speculation.drafter import (
    NO_DRAFT,
    Draft,
    DraftedRequest,
    Drafter,
    DraftSettings,
)
from rbln_backend.speculation.drafting_costs import DraftingCosts
from rbln_backend.speculation.prediction import PredictionFirst
from rbln_backend.speculation.step_costs import StepCosts
from rbln_backend.vllm_compat.surface import (
    CachedRequestState,
    DraftTokenIds,
    SamplingParams,
    SchedulerOutput,
    VllmConfig,
    compiled_sizes,
    configured,
)
from rbln_backend.worker.drafts.model_drafter import (
    DraftSource,
    EndedStep,
    ModelDrafter,
)
from rbln_backend.worker.step.batches import RequestBatches


class StepSeconds(NamedTuple):
    """Durations of one step."""

    graph: float
    whole: float
    """From the scheduler's output to the sampled tokens."""


class Drafting(Protocol):
    """Proposes drafts from the tokens of each step."""

    by_step: bool
    """The result of a step has the drafts of its requests; else the engine takes those of all."""

    def start_step(self, scheduled: SchedulerOutput) -> None:
        """Remove finished and preempted requests. Called before a step."""
        ...

    def end_step(
        self,
        batch: StepBatch,
        outputs: StepOutputs,
        token_ids: Sequence[Sequence[int]],
        took: StepSeconds,
    ) -> None:
        """Record the tokens sampled for each request. Called after a step."""
        ...

    def end_chunk(self, batch: StepBatch, outputs: StepOutputs) -> None:
        """Called instead of ``end_step`` after a chunk that ends no prompt."""
        ...

    def take(self) -> DraftTokenIds | None:
        """Return drafts of all decoding requests, None where the latest step sampled nothing."""
        ...


class NoDrafting:
    """No drafts: the engine does not speculate, or another rank proposes them."""

    by_step = False

    def start_step(self, scheduled: SchedulerOutput) -> None:
        """Do nothing."""

    def end_step(
        self,
        batch: StepBatch,
        outputs: StepOutputs,
        token_ids: Sequence[Sequence[int]],
        took: StepSeconds,
    ) -> None:
        """Do nothing."""

    def end_chunk(self, batch: StepBatch, outputs: StepOutputs) -> None:
        """Do nothing."""

    def take(self) -> DraftTokenIds | None:
        """Return None."""
        return None


@dataclass(slots=True)
class _Decoding:
    """A request with sampled tokens; ``acceptance`` is None if its drafts are off."""

    state: CachedRequestState
    acceptance: Acceptance | None
    computed: Acceptance = field(default_factory=lambda: Acceptance(is_computed=True))
    """Of the draft model's drafts."""
    expected_gain: float = 1.0
    """Of its next step, by the choice of its drafts."""


class HostDrafting:
    """Drafting over a drafter on the host, on the one rank that replies.

    A draft model's graphs have collectives. So every rank drafts with one, from the same tokens,
    and the first decides by its times when the graphs run.

    Drafts of every decoding request are proposed after every step, also while none are checked:
    the tokens sampled next show if they were right. A draft model pauses meanwhile.
    """

    by_step = False

    def __init__(
        self,
        drafter: Drafter,
        batches: RequestBatches,
        table: VerifyTable,
        costs: StepCosts,
        counts: DraftCounts,
        *,
        most: int,
        max_model_len: int,
        model: ModelDrafter | None = None,
    ) -> None:
        """``table``: the compiled sizes; ``most``: most drafts of a request in a step.

        ``drafter`` prefers a client's prediction; it has the drafts of ``model``, if there is one.
        """
        self._drafter, self._model = drafter, model
        self._requests = batches.requests
        self._table, self._costs, self._counts = table, costs, counts
        self._chooser = Chooser(table, costs)
        self._most = most
        self._max_model_len = max_model_len
        self._begun: dict[str, _Decoding] = {}
        # Requests to draft for: those of the latest decode step, and of prefill steps since.
        self._decoding: list[str] = []
        self._sampled = False
        self._choice = StepChoice()

    def start_step(self, scheduled: SchedulerOutput) -> None:
        """As ``Drafting``. An answer is complete if its last token ends it, else aborted."""
        self._sampled = False
        gone = scheduled.finished_req_ids | (scheduled.preempted_req_ids or set())
        if gone:
            self._decoding = [name for name in self._decoding if name not in gone]
        if self._model is not None:
            for name in gone:
                self._model.forget(name)
        for name in scheduled.finished_req_ids & self._begun.keys():
            begun = self._begun.pop(name)
            if begun.acceptance is not None:
                self._drafter.end(name, finished=self._has_ended(begun.state))

    def end_step(
        self,
        batch: StepBatch,
        outputs: StepOutputs,
        token_ids: Sequence[Sequence[int]],
        took: StepSeconds,
    ) -> None:
        """As ``Drafting``."""
        self._sampled = True
        names = batch.input_batch.req_ids
        if batch.phase.takes_chunk:
            self._decoding += names
        else:
            self._decoding = list(names)
            self._count(batch, sum(map(len, token_ids)), took)
        rights = list[bool | None]()
        for name, tokens in zip(names, token_ids, strict=True):
            begun = self._begun.get(name) or self._begin(self._requests[name])
            if begun.acceptance is not None:
                begun.acceptance.record(tokens)
                rights.append(begun.computed.record(tokens))
                self._drafter.extend(name, tokens)
        if self._model is not None:
            if rights.count(True) > rights.count(False):
                self._model.pace.hurry()
            going_on = [
                row
                for row, name in enumerate(names)
                if token_ids[row] and not self._has_ended(self._begun[name].state)
            ]
            self._model.draft(self._ended(batch, outputs, token_ids), going_on)

    def end_chunk(self, batch: StepBatch, outputs: StepOutputs) -> None:
        """As ``Drafting``."""
        if self._model is not None:
            self._model.draft(self._ended(batch, outputs, [()] * batch.num_reqs))

    def take(self) -> DraftTokenIds | None:
        """As ``Drafting``."""
        if not self._sampled:
            return None
        begun = [self._begun[name] for name in self._decoding]
        running = [request for request in begun if not self._has_ended(request.state)]
        drafts = dict[str, Draft]()
        known, computed = list[list[float]](), list[list[float]]()
        for request in running:
            if request.acceptance is not None:
                draft = drafts[request.state.req_id] = self._propose(request.state)
                if draft.is_computed and draft.tokens:
                    computed.append(request.computed.expect(draft))
                elif draft.tokens:
                    known.append(request.acceptance.expect(draft))
        uses_model = self._choose(known, computed, len(running))
        for request in running:
            request.expected_gain = self._choice.gain
        most = self._choice.length - 1
        return DraftTokenIds(
            list(drafts),
            [
                draft.tokens[:most] if uses_model or not draft.is_computed else []
                for draft in drafts.values()
            ],
        )

    def _choose(self, known: list[list[float]], computed: list[list[float]], requests: int) -> bool:
        """Choose the next step's size; return True if it checks drafts of the draft model."""
        self._choice = self._chooser.choose(known, requests)
        if self._model is None or not computed:
            return False
        drafting_s = self._model.costs.seconds(requests)
        choice = self._chooser.choose(known + computed, requests, drafting_s)
        pays = self._model.decide(choice.length > 1 and choice.gain >= self._choice.gain)
        if pays:
            self._choice = choice
        return pays

    def _ended(
        self, batch: StepBatch, outputs: StepOutputs, token_ids: Sequence[Sequence[int]]
    ) -> EndedStep:
        names = batch.input_batch.req_ids
        states = [*(self._requests[name] for name in names), *batch.decode_prefill]
        return EndedStep(batch, states, outputs, token_ids)

    def _count(self, batch: StepBatch, tokens: int, took: StepSeconds) -> None:
        size = self._table.find(batch.num_reqs, batch.length)
        if batch.phase is Phase.VERIFY:
            drafting_s = self._model.seconds if self._model is not None else 0.0
            without = self._costs.seconds((size[0], 1)) / (took.whole + drafting_s)
            # Requests without drafts may have begun in this step, with a prompt's last token.
            rows = zip(batch.input_batch.req_ids, batch.drafts, strict=True)
            gains = [self._begun[name].expected_gain for name, drafts in rows if drafts]
            self._counts.record(
                size,
                checked=sum(map(len, batch.drafts)),
                accepted=tokens - batch.num_reqs,
                expected_gain=gains[0] if gains else 1.0,
                gain=tokens / batch.num_reqs * without,
            )
        self._costs.record(size, took.graph, took.whole)

    def _propose(self, state: CachedRequestState) -> Draft:
        limit = min(self._most, self._tokens_left(state) - 1)
        return self._drafter.propose(state.req_id, limit) if limit > 0 else NO_DRAFT

    def _tokens_left(self, state: CachedRequestState) -> int:
        """Return the tokens that may still be sampled for the request."""
        params = _sampling(state)
        left = self._max_model_len - state.num_tokens
        if params.max_tokens is not None:
            left = min(left, params.max_tokens - len(state.output_token_ids))
        return left

    def _has_ended(self, state: CachedRequestState) -> bool:
        return self._tokens_left(state) < 1 or _has_stopped(state)

    def _begin(self, state: CachedRequestState) -> _Decoding:
        settings = DraftSettings.of(_sampling(state).extra_args)
        begun = _Decoding(state, None if settings.off else Acceptance())
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


class StepDrafting(HostDrafting):
    """Drafting for the requests of each step alone: other stages run steps of other requests."""

    by_step = True

    def take(self) -> DraftTokenIds | None:
        """Return drafts of the latest step's requests, None where it sampled nothing."""
        drafts, self._decoding = super().take(), []
        return drafts


def make_drafting(
    config: VllmConfig,
    batches: RequestBatches,
    board: MetricsBoard,
    *,
    table: VerifyTable,
    measured: Mapping[Size, float],
    replies: bool,
    source: DraftSource | None,
    drafting: Mapping[int, float],
) -> Drafting:
    """Return the drafting of a rank; without a draft model, of the one that replies alone.

    ``measured``: seconds of graphs by size, from warm-up. ``source``: the draft model's graphs,
    None for a method without one; ``drafting``: their seconds after a decode step, by bucket.
    """
    speculation = config.speculative_config
    if speculation is None or not (replies or source is not None):
        return NoDrafting()
    sizes, model = compiled_sizes(config).drafted, None
    if source is not None and sizes is not None:
        costs = DraftingCosts(sizes.requests, drafting)
        model = ModelDrafter(source, costs, FirstRank.of_this_rank())
    stages = config.parallel_config.pipeline_parallel_size
    return (HostDrafting if stages == 1 else StepDrafting)(
        PredictionFirst(model or make_drafter(speculation, shared=configured(config).share_drafts)),
        batches,
        table,
        StepCosts(table, measured),
        DraftCounts(board, table),
        most=speculation.num_speculative_tokens,
        max_model_len=config.model_config.max_model_len,
        model=model,
    )


def _sampling(state: CachedRequestState) -> SamplingParams:
    assert state.sampling_params is not None, "models that pool do not draft"
    return state.sampling_params


def _has_stopped(state: CachedRequestState) -> bool:
    """Return True if the latest token is a stop token that may end the request."""
    params, tokens = _sampling(state), state.output_token_ids
    may_end = len(tokens) >= max(params.min_tokens, 1)
    return may_end and tokens[-1] in params.all_stop_token_ids
