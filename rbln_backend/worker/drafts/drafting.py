"""Asks a drafter for each request's next tokens, and tells it what came of them."""

from __future__ import annotations

from typing import Protocol

from rbln_backend.speculation.choice import make_drafter
from rbln_backend.speculation.drafter import DraftedRequest, Drafter, Wishes
from rbln_backend.speculation.trust import Trust
from rbln_backend.vllm_compat.surface import (
    CachedRequestState,
    DraftTokenIds,
    SamplingParams,
    SchedulerOutput,
    VllmConfig,
    configured,
)
from rbln_backend.worker.step.batches import RequestBatches, StepWork


class Drafting(Protocol):
    """What the step loop tells of its requests, and takes drafts from."""

    def forget(self, scheduled: SchedulerOutput) -> None:
        """Before a step: some requests are gone."""
        ...

    def note(self, work: StepWork, token_ids: list[list[int]]) -> None:
        """After a step: what each of its requests got."""
        ...

    def take(self) -> DraftTokenIds | None:
        """Drafts for the requests of the latest step, None where it sampled nothing."""
        ...


class NoDrafting:
    """The engine does not speculate, or another rank is asked for drafts."""

    def forget(self, scheduled: SchedulerOutput) -> None:
        """Nobody is to be told."""

    def note(self, work: StepWork, token_ids: list[list[int]]) -> None:
        """Nobody is to be told."""

    def take(self) -> DraftTokenIds | None:
        """None."""
        return None


class HostDrafting:
    """Over a drafter on the host, for the one rank that replies."""

    def __init__(
        self, drafter: Drafter, batches: RequestBatches, *, most: int, max_model_len: int
    ) -> None:
        """``most``: drafts of a request in a step."""
        self._drafter = drafter
        self._requests = batches.requests
        self._most = most
        self._max_model_len = max_model_len
        self._begun: dict[str, CachedRequestState] = {}
        self._trust: dict[str, Trust] = {}
        self._latest: list[str] = []

    def forget(self, scheduled: SchedulerOutput) -> None:
        """As ``Drafting``; a request ended by itself if its last token says so."""
        for request_id in scheduled.finished_req_ids & self._begun.keys():
            state = self._begun.pop(request_id)
            del self._trust[request_id]
            self._drafter.end(request_id, finished=self._room(state) < 0 or _has_stopped(state))
        self._latest = []

    def note(self, work: StepWork, token_ids: list[list[int]]) -> None:
        """As ``Drafting``."""
        self._latest = []
        for row, (request_id, tokens) in enumerate(zip(work.batch.req_ids, token_ids, strict=True)):
            state = self._requests[request_id]
            if not self._wants(state):
                continue
            if request_id not in self._begun:
                self._begin(state)
            self._drafter.extend(request_id, tokens)
            drafted = len(work.drafts[row]) if work.drafts else 0
            self._trust[request_id].judge(drafted, len(tokens) - 1)
            self._latest.append(request_id)

    def take(self) -> DraftTokenIds | None:
        """As ``Drafting``."""
        if not self._latest:
            return None
        ids, self._latest = self._latest, []
        return DraftTokenIds(ids, [self._propose(self._begun[i]) for i in ids])

    def _propose(self, state: CachedRequestState) -> list[int]:
        limit = min(self._trust[state.req_id].limit(), self._room(state))
        if limit < 1 or _has_stopped(state):
            return []
        return self._drafter.propose(state.req_id, limit)

    def _room(self, state: CachedRequestState) -> int:
        """Drafts that the request could still take, besides the token that follows them."""
        params = _sampling(state)
        room = self._max_model_len - state.num_tokens
        if params.max_tokens is not None:
            room = min(room, params.max_tokens - len(state.output_token_ids))
        return room - 1

    def _begin(self, state: CachedRequestState) -> None:
        wishes = Wishes.of(_sampling(state).extra_args)
        adapter = state.lora_request
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
        self._begun[state.req_id] = state
        self._trust[state.req_id] = Trust(self._most)

    def _wants(self, state: CachedRequestState) -> bool:
        return state.req_id in self._begun or not Wishes.of(_sampling(state).extra_args).off


def make_drafting(config: VllmConfig, batches: RequestBatches, *, replies: bool) -> Drafting:
    """``replies``: this rank is the one that is asked for drafts."""
    speculation = config.speculative_config
    if speculation is None or not replies:
        return NoDrafting()
    return HostDrafting(
        make_drafter(speculation, shared=configured(config).share_drafts),
        batches,
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
