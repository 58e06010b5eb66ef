"""Asks a drafter for each request's next tokens, and has as many of them checked as pay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from rbln_backend.bucketing.verify import Size, VerifyTable
from rbln_backend.compiler.port import Phase
from rbln_backend.reporting.draft_counts import DraftCounts
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.speculation.acceptance import Acceptance
from rbln_backend.speculation.choice import make_drafter
from rbln_backend.speculation.chooser import Choice, Chooser
from rbln_backend.speculation.drafter import NO_DRAFT, Draft, DraftedRequest, Drafter, Wishes
from rbln_backend.speculation.step_costs import StepCosts
from rbln_backend.vllm_compat.surface import (
    CachedRequestState,
    DraftTokenIds,
    SamplingParams,
    SchedulerOutput,
    VllmConfig,
    configured,
)
from rbln_backend.worker.step.batches import RequestBatches, StepWork


class StepSeconds(NamedTuple):
    """What a step took."""

    graph: float
    whole: float
    """From the scheduler's output to the sampled tokens."""


class Drafting(Protocol):
    """What the step loop tells of its requests, and takes drafts from."""

    def forget(self, scheduled: SchedulerOutput) -> None:
        """Before a step: some requests are gone."""
        ...

    def note(self, work: StepWork, token_ids: Sequence[Sequence[int]], took: StepSeconds) -> None:
        """After a step: what each of its requests got."""
        ...

    def take(self) -> DraftTokenIds | None:
        """Drafts for all who decode, None where the latest step sampled nothing."""
        ...


class NoDrafting:
    """The engine does not speculate, or another rank is asked for drafts."""

    def forget(self, scheduled: SchedulerOutput) -> None:
        """Nobody is to be told."""

    def note(self, work: StepWork, token_ids: Sequence[Sequence[int]], took: StepSeconds) -> None:
        """Nobody is to be told."""

    def take(self) -> DraftTokenIds | None:
        """None."""
        return None


@dataclass(frozen=True, slots=True)
class _Begun:
    """A request that has got tokens; one that wants no drafts has no acceptance."""

    state: CachedRequestState
    acceptance: Acceptance | None


class HostDrafting:
    """Over a drafter on the host, for the one rank that replies.

    Whoever decodes has its next tokens guessed after every step, also while none are checked: what
    comes then shows what checking them would have been worth.
    """

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
    ) -> None:
        """``table``: the compiled sizes; ``most``: drafts of a request in a step."""
        self._drafter = drafter
        self._requests = batches.requests
        self._table, self._costs, self._counts = table, costs, counts
        self._chooser = Chooser(table, costs)
        self._most = most
        self._max_model_len = max_model_len
        self._begun: dict[str, _Begun] = {}
        # Whose next tokens are due: the latest decode step's requests, and prompts ended since.
        self._decoding: list[str] = []
        self._sampled = False
        self._choice = Choice()

    def forget(self, scheduled: SchedulerOutput) -> None:
        """As ``Drafting``; a request ended by itself if its last token says so."""
        self._sampled = False
        gone = scheduled.finished_req_ids | (scheduled.preempted_req_ids or set())
        if gone:
            self._decoding = [name for name in self._decoding if name not in gone]
        for name in scheduled.finished_req_ids & self._begun.keys():
            begun = self._begun.pop(name)
            if begun.acceptance is not None:
                self._drafter.end(name, finished=self._has_ended(begun.state))

    def note(self, work: StepWork, token_ids: Sequence[Sequence[int]], took: StepSeconds) -> None:
        """As ``Drafting``."""
        self._sampled = True
        names = work.batch.req_ids
        if work.phase.takes_chunk:
            self._decoding += names
        else:
            self._decoding = list(names)
            self._count(work, sum(map(len, token_ids)), took)
        for name, tokens in zip(names, token_ids, strict=True):
            begun = self._begun.get(name) or self._begin(self._requests[name])
            if begun.acceptance is not None:
                begun.acceptance.note(tokens)
                self._drafter.extend(name, tokens)

    def take(self) -> DraftTokenIds | None:
        """As ``Drafting``."""
        if not self._sampled:
            return None
        begun = [self._begun[name] for name in self._decoding]
        going = [one for one in begun if not self._has_ended(one.state)]
        drafts, guesses = dict[str, list[int]](), list[list[float]]()
        for one in going:
            if one.acceptance is not None:
                draft = self._propose(one.state)
                drafts[one.state.req_id] = draft.tokens
                if draft.tokens:
                    guesses.append(one.acceptance.guess(draft))
        self._choice = self._chooser.choose(guesses, len(going))
        most = self._choice.length - 1
        return DraftTokenIds(list(drafts), [tokens[:most] for tokens in drafts.values()])

    def _count(self, work: StepWork, tokens: int, took: StepSeconds) -> None:
        size = self._table.find(work.num_reqs, work.length)
        if work.phase is Phase.VERIFY:
            without = self._costs.of((size[0], 1)) / took.whole
            self._counts.record(
                size,
                checked=sum(map(len, work.drafts)),
                accepted=tokens - work.num_reqs,
                expected_gain=self._choice.gain,
                gain=tokens / work.num_reqs * without,
            )
        self._costs.note(size, took.graph, took.whole)

    def _propose(self, state: CachedRequestState) -> Draft:
        limit = min(self._most, self._room(state))
        return self._drafter.propose(state.req_id, limit) if limit > 0 else NO_DRAFT

    def _room(self, state: CachedRequestState) -> int:
        """Drafts that the request could still take, besides the token that follows them."""
        params = _sampling(state)
        room = self._max_model_len - state.num_tokens
        if params.max_tokens is not None:
            room = min(room, params.max_tokens - len(state.output_token_ids))
        return room - 1

    def _has_ended(self, state: CachedRequestState) -> bool:
        return self._room(state) < 0 or _has_stopped(state)

    def _begin(self, state: CachedRequestState) -> _Begun:
        wishes = Wishes.of(_sampling(state).extra_args)
        begun = _Begun(state, None if wishes.off else Acceptance())
        self._begun[state.req_id] = begun
        adapter = state.lora_request
        if not wishes.off:
            self._drafter.begin(
                DraftedRequest(
                    request_id=state.req_id,
                    prompt=state.prompt_token_ids or (),
                    prediction=wishes.prediction,
                    # Under its name other weights may be loaded later.
                    adapter=f"{adapter.lora_name}:{adapter.lora_int_id}" if adapter else None,
                    key=wishes.key,
                )
            )
        return begun


def make_drafting(
    config: VllmConfig,
    batches: RequestBatches,
    board: MetricsBoard,
    *,
    table: VerifyTable,
    measured: Mapping[Size, float],
    replies: bool,
) -> Drafting:
    """``measured``: seconds of graphs; ``replies``: this rank is the one asked for drafts."""
    speculation = config.speculative_config
    if speculation is None or not replies:
        return NoDrafting()
    return HostDrafting(
        make_drafter(speculation, shared=configured(config).share_drafts),
        batches,
        table,
        StepCosts(table, measured),
        DraftCounts(board, table),
        most=speculation.num_speculative_tokens,
        max_model_len=config.model_config.max_model_len,
    )


def _sampling(state: CachedRequestState) -> SamplingParams:
    assert state.sampling_params is not None, "models that pool do not draft"
    return state.sampling_params


def _has_stopped(state: CachedRequestState) -> bool:
    """Whether the latest token may have ended the request."""
    params, tokens = _sampling(state), state.output_token_ids
    may_end = len(tokens) >= max(params.min_tokens, 1)
    return may_end and tokens[-1] in params.all_stop_token_ids
