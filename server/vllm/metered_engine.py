"""vLLM's engine client, which tells each HTTP request what the engine works on for it."""

from __future__ import annotations

from typing import Any

from vllm.exceptions import MaxQueuedTokensError
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

from server.request.record import record_var
from server.tiers.tier import Tier
from server.vllm.errors import BacklogError


class MeteredLLM(AsyncLLM):
    """Adds a meter to the record of the HTTP request that is being worked on.

    A meter is read when the request has ended, however it has; while tokens come nothing is done.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._flex: list[RequestState] = []

    async def add_request(
        self, request_id: str, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        """Add a request to the engine as AsyncLLM does, in the class of its service tier."""
        record = record_var.get()
        tier = None if record is None else record.tier
        if record is not None and record.trace_headers is not None:
            kwargs["trace_headers"] = record.trace_headers
        if tier is not None and tier.engine_priority is not None:
            kwargs["priority"] = tier.engine_priority
        collector = await super().add_request(request_id, *args, **kwargs)
        if record is not None:
            states = self._states(request_id, collector)
            if tier is Tier.FLEX:
                self._flex += states
            record.meters.append(lambda: _used(states))
            record.prefix_meter = lambda: _prefix(states)
        return collector

    def check_admission(self, n: int = 1, request_id: str | None = None) -> None:
        """Refuse a request beyond a limit as upstream does; `BacklogError` has the numbers."""
        try:
            super().check_admission(n, request_id)
        except MaxQueuedTokensError as error:
            limit = self.scheduler_config.max_num_queued_tokens
            raise BacklogError(self.get_num_queued_tokens(), limit) from error

    def get_num_queued_tokens(self) -> int:
        """Return the prompt tokens that wait in the class of whoever asks.

        What flex leaves waiting is no reason to refuse anybody else.
        """
        self._flex = [state for state in self._flex if state.is_prefilling]
        behind = sum(state.prompt_len for state in self._flex)
        record = record_var.get()
        if record is not None and record.tier is Tier.FLEX:
            return behind
        return super().get_num_queued_tokens() - behind

    def _states(self, request_id: str, collector: RequestOutputCollector) -> list[RequestState]:
        """Return the states of what was just added: one for each of its answers."""
        # Requests of other clients may have the same id, but none has the same collector.
        processor = self.output_processor
        found = (processor.request_states.get(i) for i in processor.external_req_ids[request_id])
        return [state for state in found if state is not None and state.queue is collector]


def _used(states: list[RequestState]) -> tuple[int, int]:
    """Return prompt and completion tokens; the answers of one request share their prompt."""
    completion = sum(
        state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None
    )
    return (states[0].prompt_len if states else 0), completion


def _prefix(states: list[RequestState]) -> tuple[int, int]:
    """Return prompt tokens read from and written to the prefix cache, once they are known."""
    if not states:
        return 0, 0
    return states[0].num_cached_tokens, states[0].num_cache_creation_tokens
