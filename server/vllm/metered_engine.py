"""vLLM's engine client, which tells each HTTP request what the engine works on for it."""

from __future__ import annotations

from typing import Any

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

from server.request.record import Meter, record_var


class MeteredLLM(AsyncLLM):
    """Adds a meter to the record of the HTTP request that is being worked on.

    A meter is read when the request has ended, however it has; while tokens come nothing is done.
    """

    async def add_request(
        self, request_id: str, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        """Add a request to the engine as AsyncLLM does."""
        collector = await super().add_request(request_id, *args, **kwargs)
        if (record := record_var.get()) is not None:
            record.meters.append(self._meter(request_id, collector))
        return collector

    def _meter(self, request_id: str, collector: RequestOutputCollector) -> Meter:
        """Return the meter of what was just added: one state for each of its answers."""
        # Requests of other clients may have the same id, but none has the same collector.
        processor = self.output_processor
        found = (processor.request_states.get(i) for i in processor.external_req_ids[request_id])
        states = [state for state in found if state is not None and state.queue is collector]
        return lambda: _used(states)


def _used(states: list[RequestState]) -> tuple[int, int]:
    """Return prompt and completion tokens; the answers of one request share their prompt."""
    completion = sum(
        state.detokenizer.num_output_tokens() for state in states if state.detokenizer is not None
    )
    return (states[0].prompt_len if states else 0), completion
