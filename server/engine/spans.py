"""The engine's spans: one for each sequence of a traced request, also of aborted ones.

vLLM's output processor records a span for every finished request, traced or not, and none for
aborted requests.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from vllm.tracing import SpanAttributes, SpanKind, extract_trace_context, instrument_manual
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestState

from server.observability.tracing import (
    CACHE_READ_TOKENS,
    FINISH_REASONS,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    AttributeValue,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
    from vllm.v1.engine.output_processor import RequestOutputCollector
    from vllm.v1.engine.parallel_sampling import ParentRequest
    from vllm.v1.metrics.stats import IterationStats, RequestStateStats

NAME = "llm_request"
"""vLLM's name of its span."""
_NS = 1_000_000_000


class _Traced(NamedTuple):
    """A running sequence of a traced request."""

    context: Mapping[str, str]
    arrival_time: float
    state: RequestState


class TracedOutputs(OutputProcessor):
    """vLLM's output processor, with spans of traced requests only, including aborted ones."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self._traced: dict[str, _Traced] = {}

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        super().add_request(request, prompt, parent_req, request_index, queue)
        if self.tracing_enabled and request.trace_headers:
            state = self.request_states[request.request_id]
            traced = _Traced(request.trace_headers, request.arrival_time, state)
            self._traced[request.request_id] = traced

    def do_tracing(
        self,
        engine_core_output: EngineCoreOutput,
        req_state: RequestState,
        iteration_stats: IterationStats | None,  # noqa: ARG002 (vLLM's signature)
    ) -> None:
        # The engine reports no reason if the detokenizer found a stop string.
        self._record(req_state.request_id, engine_core_output.finish_reason or FinishReason.STOP)

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        aborted = super().abort_requests(request_ids, internal)
        for request_id in aborted:
            self._record(request_id, FinishReason.ABORT)
        return aborted

    def _record(self, request_id: str, reason: FinishReason) -> None:
        traced = self._traced.pop(request_id, None)
        if traced is None:
            return
        instrument_manual(
            span_name=NAME,
            start_time=int(traced.arrival_time * _NS),
            end_time=time.time_ns(),
            attributes=_attributes(traced, reason),
            context=extract_trace_context(traced.context),
            kind=SpanKind.INTERNAL,
        )


def _attributes(traced: _Traced, reason: FinishReason) -> dict[str, AttributeValue]:
    state = traced.state
    found: dict[str, AttributeValue] = {
        SpanAttributes.GEN_AI_REQUEST_ID: state.external_req_id,
        FINISH_REASONS: [str(reason)],
        INPUT_TOKENS: state.prompt_len,
        CACHE_READ_TOKENS: state.num_cached_tokens,
        SpanAttributes.GEN_AI_LATENCY_E2E: time.time() - traced.arrival_time,
    }
    if state.detokenizer is not None:
        found[OUTPUT_TOKENS] = state.detokenizer.num_output_tokens()
    return found if state.stats is None else found | _latencies(state.stats)


def _latencies(stats: RequestStateStats) -> dict[str, AttributeValue]:
    """Return the seconds of each stage that a sequence has reached."""
    found: dict[str, AttributeValue] = {}
    if stats.scheduled_ts:
        found[SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE] = stats.scheduled_ts - stats.queued_ts
    if stats.first_token_ts:
        first, last = stats.first_token_ts, stats.last_token_ts
        found |= {
            SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN: stats.first_token_latency,
            SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL: first - stats.scheduled_ts,
            SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_DECODE: last - first,
            SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_INFERENCE: last - stats.scheduled_ts,
        }
    return found
