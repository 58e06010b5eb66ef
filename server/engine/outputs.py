"""vLLM's output processor with queue timeouts, progress of prompts, logprobs and spans.

The scheduler ends a request that exceeds `--max-queue-s` with our stop reason. vLLM's serving
classes handle its error differently per endpoint, and some log a traceback. So the request's record
stores the error, which takes precedence in the front end.

vLLM records a span for every finished request, traced or not, and none for aborted ones. Here each
sequence of a traced request has one, also of an aborted request.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any, cast
from weakref import WeakKeyDictionary

from msgspec.structs import replace
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from vllm.exceptions import GracefulHTTPError
from vllm.tracing import SpanAttributes, SpanKind, extract_trace_context, instrument_manual
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.output_processor import (
    OutputProcessor,
    OutputProcessorOutput,
    RequestOutputCollector,
    RequestState,
)
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from rbln_backend.api.names import PROMPT_PROGRESS, QUEUE_TIMEOUT
from server.errors import QueueTimeoutError, ServerError
from server.observability.tracing import (
    CACHE_READ_TOKENS,
    FINISH_REASONS,
    INPUT_TOKENS,
    OUTPUT_TOKENS,
    AttributeValue,
)
from server.request.record import RequestRecord, record_var
from server.vllm.logprobs import AnswerLogprobs, TokenBytes, token_texts
from server.vllm.patches import (
    use_decode_stream,
    use_logprobs_processor,
    use_output_processor,
    use_stat_loggers,
    use_token_texts,
)
from server.vllm.text_stream import DirectState, push_to

SPAN = "llm_request"
"""vLLM's name of its span."""
_NS = 1_000_000_000
_REPORTS = (QUEUE_TIMEOUT, PROMPT_PROGRESS)
"""Stop reasons of outputs that are reports of our scheduler."""


class QueueAwareOutputs(OutputProcessor):
    """vLLM's output processor, which maps output queues to request records."""

    def __init__(self, engine: AsyncLLM, max_queue_s: float, *, logs_deltas: bool) -> None:
        super().__init__(
            engine.renderer.tokenizer,
            log_stats=engine.log_stats,
            stream_interval=engine.scheduler_config.stream_interval,
            tracing_enabled=engine.output_processor.tracing_enabled,
        )
        self._engine, self._max_queue_s = engine, max_queue_s
        self._logs_deltas = logs_deltas
        self._records: WeakKeyDictionary[RequestOutputCollector, RequestRecord]
        self._records = WeakKeyDictionary()
        tokenizer = getattr(engine.renderer.tokenizer, "_tokenizer", None)
        self._token_bytes = None if tokenizer is None else TokenBytes(tokenizer)
        # The running sequences of traced requests: the headers, the time of arrival, the state.
        self._traced: dict[str, tuple[Mapping[str, str], float, RequestState]] = {}

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        super().add_request(request, prompt, parent_req, request_index, queue)
        record = record_var.get()
        if record is not None and queue is not None:
            self._records[queue] = record
        state: RequestState = self.request_states[request.request_id]
        if self.tracing_enabled and request.trace_headers:
            traced = request.trace_headers, request.arrival_time, state
            self._traced[request.request_id] = traced
        if self._token_bytes is not None:
            keep_prompt_out(state, self._token_bytes)
        processor = state.logprobs_processor
        if processor is not None and (processor.num_logprobs, processor.num_prompt_logprobs) != (
            None,
            None,
        ):
            use_logprobs_processor(state, AnswerLogprobs.of(processor, state.detokenizer))
        # vLLM's generators write the log of outputs.
        if record is not None:
            record.direct.claims += 1
            if record.direct.claims == 1 and not self._logs_deltas:
                push_to(state, record.direct)

    def process_outputs(
        self,
        engine_core_outputs: list[EngineCoreOutput],
        engine_core_timestamp: float | None = None,
        iteration_stats: IterationStats | None = None,
    ) -> OutputProcessorOutput:
        late: list[str] = []
        # The scheduler puts these first.
        while engine_core_outputs and engine_core_outputs[0].stop_reason in _REPORTS:
            report, *engine_core_outputs = engine_core_outputs
            if report.stop_reason == QUEUE_TIMEOUT:
                late += self._end(report.request_id, queue_timeout(self._max_queue_s))
            else:
                self._show_progress(report)
        outputs = engine_core_outputs
        if any(len(one.new_token_ids) != 1 or one.finish_reason is not None for one in outputs):
            outputs = [part for one in outputs for part in self._parts(one)]
        done = super().process_outputs(outputs, engine_core_timestamp, iteration_stats)
        if iteration_stats is not None and len(outputs) > len(engine_core_outputs):
            # One for each step of a request.
            latencies = iteration_stats.inter_token_latencies_iter
            latencies[:] = filter(None, latencies)
        done.reqs_to_abort.extend(late)
        return done

    def _parts(self, output: EngineCoreOutput) -> list[EngineCoreOutput]:
        """Return an output of one token each where a stop string may end the answer.

        vLLM cuts the text at a stop string, but counts and returns all tokens of a step with
        drafts. The token that an ``echo`` without an answer samples is none of the answer.
        """
        state, tokens = self.request_states.get(output.request_id), output.new_token_ids
        record = None if state is None or state.queue is None else self._records.get(state.queue)
        if record is not None and record.echoes_only:
            return [replace(output, new_token_ids=[], new_logprobs=None)]
        if len(tokens) < 2 or not getattr(getattr(state, "detokenizer", None), "stop", None):
            return [output]
        if isinstance(state, DirectState):
            state.parts_left = len(tokens) - 1
        logprobs = output.new_logprobs
        *rows, last = (
            logprobs and logprobs.slice_request(index, 1) for index in range(len(tokens))
        )
        parts = [
            EngineCoreOutput(output.request_id, [token], new_logprobs=row)
            for token, row in zip(tokens, rows, strict=False)
        ]
        parts[0] = replace(parts[0], events=output.events)
        return [*parts, replace(output, new_token_ids=tokens[-1:], new_logprobs=last, events=None)]

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """Abort as vLLM does, which counts no aborted request."""
        ids = list(request_ids)
        internal_ids = (
            ids if internal else [i for name in ids for i in self.external_req_ids.get(name, ())]
        )
        # The children of a request are aborted by a call of their own.
        states = [self.request_states[name] for name in internal_ids if name in self.request_states]
        aborted = super().abort_requests(ids, internal)
        for request_id in aborted:
            self._record_span(request_id, FinishReason.ABORT)
        self._count_aborted(states)
        return aborted

    def do_tracing(
        self,
        engine_core_output: EngineCoreOutput,
        req_state: RequestState,
        iteration_stats: IterationStats | None,  # noqa: ARG002 (vLLM's signature)
    ) -> None:
        # The engine reports no reason if the detokenizer found a stop string.
        reason = engine_core_output.finish_reason or FinishReason.STOP
        self._record_span(req_state.request_id, reason)

    def _record_span(self, request_id: str, reason: FinishReason) -> None:
        if request_id not in self._traced:
            return
        headers, arrival_time, state = self._traced.pop(request_id)
        instrument_manual(
            span_name=SPAN,
            start_time=int(arrival_time * _NS),
            end_time=time.time_ns(),
            attributes=_span_attributes(state, arrival_time, reason),
            context=extract_trace_context(headers),
            kind=SpanKind.INTERNAL,
        )

    def _count_aborted(self, states: Sequence[RequestState]) -> None:
        """Record requests as finished by an abort, in vLLM's metrics."""
        manager = self._engine.logger_manager
        engines = getattr(self._engine.engine_core, "reqs_in_flight", {})
        if manager is None:
            return
        for state in states:
            stats, times = IterationStats(), state.stats
            assert times is not None
            if state.is_prefilling:
                # The engine reports times with the first token: all of it counts as waiting.
                waited = stats.iteration_timestamp - times.arrival_time
                begun: dict[str, Any] = dict.fromkeys(
                    ("scheduled_ts", "first_token_ts", "last_token_ts"), waited
                )
                times = dataclasses.replace(times, **begun)
            stats.update_from_finished_request(
                FinishReason.ABORT,
                state.external_req_id,
                state.prompt_len,
                state.max_tokens_param,
                times,
                state.num_cached_tokens,
            )
            engine = int.from_bytes(engines.get(state.request_id, b""), "little")
            manager.record(None, stats, engine_idx=engine)

    def _show_progress(self, report: EngineCoreOutput) -> None:
        """Pass the progress of a prompt on to its stream."""
        state = self.request_states.get(report.request_id)
        if state is None or state.queue is None:
            return
        record = self._records.get(state.queue)
        if record is not None and record.progress is not None and report.kv_transfer_params:
            record.progress.update(report.kv_transfer_params)

    def _end(self, request_id: str, error: ServerError) -> list[str]:
        """End a request with all its sequences; return ids that the engine may still run."""
        state = self.request_states.get(request_id)
        if state is None or (queue := state.queue) is None:
            return []
        if (record := self._records.get(queue)) is not None:
            record.failure = error
        whole = request_id if state.parent_req is None else state.parent_req.request_id
        ended = self.abort_requests((whole,), internal=True)
        # Replaces the last output: a stream fails before its first frame.
        queue.put(GracefulHTTPError(error.code, HTTPStatus(error.status)))
        return ended


def _span_attributes(
    state: RequestState, arrival_time: float, reason: FinishReason
) -> dict[str, AttributeValue]:
    """Return the attributes of a sequence's span, with the seconds of each stage it has reached."""
    attributes: dict[str, AttributeValue] = {
        SpanAttributes.GEN_AI_REQUEST_ID: state.external_req_id,
        FINISH_REASONS: [str(reason)],
        INPUT_TOKENS: state.prompt_len,
        CACHE_READ_TOKENS: state.num_cached_tokens,
        SpanAttributes.GEN_AI_LATENCY_E2E: time.time() - arrival_time,
    }
    if state.detokenizer is not None:
        attributes[OUTPUT_TOKENS] = state.detokenizer.num_output_tokens()
    stats = state.stats
    if stats is not None and stats.scheduled_ts:
        queued_s = stats.scheduled_ts - stats.queued_ts
        attributes[SpanAttributes.GEN_AI_LATENCY_TIME_IN_QUEUE] = queued_s
    if stats is not None and stats.first_token_ts:
        first, last = stats.first_token_ts, stats.last_token_ts
        attributes |= {
            SpanAttributes.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN: stats.first_token_latency,
            SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL: first - stats.scheduled_ts,
            SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_DECODE: last - first,
            SpanAttributes.GEN_AI_LATENCY_TIME_IN_MODEL_INFERENCE: last - stats.scheduled_ts,
        }
    return attributes


def queue_timeout(max_queue_s: float) -> QueueTimeoutError:
    """Return the error of a request that was not scheduled within `max_queue_s` seconds."""
    return QueueTimeoutError(
        f"The request waited {max_queue_s:g} s for its turn on the device, the limit of this "
        "server (--max-queue-s)."
    )


def install_output_processor(engine: AsyncLLM, max_queue_s: float, *, logs_deltas: bool) -> None:
    """Replace a new engine's output processor before its first request.

    ``logs_deltas``: vLLM logs the text of each answer.
    """
    use_token_texts(token_texts)
    use_output_processor(engine, QueueAwareOutputs(engine, max_queue_s, logs_deltas=logs_deltas))


# Statistics of decode steps are recorded several steps at once. The graph evicts the metrics'
# objects from the processor's caches, so that recording a step on its own costs several times what
# it costs among others: 13 % of the HTTP process's time at one stream. Half of vLLM's calls for
# such a step set gauges of the scheduler, which only the last of several steps needs to set.

_DELAY_S = 0.25
_MAX_STEPS = 64


class DeferredStats(StatLoggerManager):
    """vLLM's loggers of steps, which get decode steps at most 0.25 seconds late.

    Steps in which a request starts or ends are recorded at once, after all earlier ones, so that
    the metrics of an answer are complete when it is.
    """

    pending: list[tuple[Any, ...]]
    timer: asyncio.TimerHandle | None

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int | None = None,
    ) -> None:
        self.pending.append((scheduler_stats, iteration_stats, mm_cache_stats, engine_idx))
        # Running requests got tokens in this step, and nothing else happened.
        is_decode = (
            iteration_stats is not None
            and iteration_stats.num_generation_tokens
            # The engine leaves them out where they are those of the step before.
            and (scheduler_stats is None or scheduler_stats.num_running_reqs)
            and not iteration_stats.finished_requests
            and not iteration_stats.time_to_first_tokens_iter
            and not iteration_stats.num_preempted_reqs
        )
        if not is_decode or len(self.pending) >= _MAX_STEPS:
            self.flush()
        elif self.timer is None:
            self.timer = asyncio.get_running_loop().call_later(_DELAY_S, self.flush)

    def flush(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        pending, self.pending = self.pending, []
        for number, (scheduler, iteration, cache, engine) in enumerate(pending, 1):
            following = pending[number] if number < len(pending) else (None,)
            is_last = following[0] is None or following[-1] != engine
            # The statistics of a later step replace all of these.
            has_only_gauges = (
                scheduler is not None
                and not scheduler.prefix_cache_stats.reset
                and not scheduler.prefix_cache_stats.requests
                and not scheduler.prefix_cache_stats.preempted_requests
                and not scheduler.kv_cache_eviction_events
                and scheduler.connector_prefix_cache_stats is None
                and scheduler.spec_decoding_stats is None
                and scheduler.kv_connector_stats is None
                and scheduler.iteration_details is None
                and scheduler.cudagraph_stats is None
                and scheduler.perf_stats is None
            )
            if has_only_gauges and not is_last:
                scheduler = None
            super().record(scheduler, iteration, cache, engine)

    def log(self) -> None:
        self.flush()
        super().log()  # type: ignore[no-untyped-call]


def defer_stats(engine: AsyncLLM) -> None:
    """Make a new engine's loggers keep decode steps for later; without statistics do nothing."""
    manager = use_stat_loggers(engine, DeferredStats)
    if manager is not None:
        manager.pending, manager.timer = [], None


# Texts of answers whose prompt ends in the middle of a character, or in U+FFFD. vLLM primes the
# decode stream of the `tokenizers` library with the prompt. The library finds no prefix in ids
# whose text ends in U+FFFD, and returns the text of the whole prompt with the first token. Such a
# prompt is replaced here by one letter and the tokens of the open character: the answer begins with
# its own text, or with the character that it completes.

_REPLACEMENT = "\ufffd"
_MOST_OPEN_BYTES = 3
"""A character of UTF-8 has at most four bytes."""


class _StreamBehindOpenCharacter:
    """A decode stream that begins with the tokens of a character that the prompt left open."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokens: Sequence[int],
        chars: int,
        skip: bool,
        token_bytes: TokenBytes,
    ) -> None:
        """Read `tokens`, which have `chars` whole characters before the open one."""
        # One letter: a decoder may drop the space before the first word of a text.
        letter = tokenizer.encode("a", add_special_tokens=False).ids
        self._stream = DecodeStream(ids=letter, skip_special_tokens=skip)
        self._unjoined: DecodeStream | None = DecodeStream(ids=letter, skip_special_tokens=skip)
        self._bytes_of = partial(token_bytes.of, skip_special_tokens=skip)
        self._drop = chars
        for token in tokens:
            self._stream.step(tokenizer, token)

    def step(self, tokenizer: Tokenizer, token: int) -> str | None:
        if self._unjoined is not None and (token_bytes := self._bytes_of(token)):
            if not 0x80 <= token_bytes[0] < 0xC0:
                # It does not continue the open character, which is then no part of the answer.
                self._stream, self._drop = self._unjoined, 0
            self._unjoined = None
        text = self._stream.step(tokenizer, token)
        if text and self._drop:
            text, self._drop = text[self._drop :], 0
        return text


def keep_prompt_out(state: RequestState, token_bytes: TokenBytes) -> None:
    """Replace the decode stream of a new request if its prompt's text ends in U+FFFD."""
    detokenizer: FastIncrementalDetokenizer = cast("FastIncrementalDetokenizer", state.detokenizer)
    prompt, tokenizer = state.prompt_token_ids, getattr(detokenizer, "tokenizer", None)
    if not prompt or not hasattr(detokenizer, "stream") or tokenizer is None:
        return
    skip = detokenizer.skip_special_tokens
    # The last tokens that have a text: one more than may be open.
    tail: list[int] = []
    for token in reversed(prompt):
        if len(tail) > _MOST_OPEN_BYTES:
            break
        if tokenizer.decode([token], skip_special_tokens=skip):
            tail.append(token)
    tail.reverse()
    if not tokenizer.decode(tail, skip_special_tokens=skip).endswith(_REPLACEMENT):
        return
    pieces = [token_bytes.of(token) for token in tail]
    size = _open_bytes(b"".join(pieces)[-_MOST_OPEN_BYTES:])
    count, last = 0, b""
    while len(last) < size:
        count += 1
        last = pieces[-count] + last
    tokens, chars = count, len(last[: len(last) - size].decode(errors="replace"))
    open_tokens = tail[len(tail) - tokens :]
    stream = _StreamBehindOpenCharacter(tokenizer, open_tokens, chars, skip, token_bytes)
    use_decode_stream(detokenizer, stream)


def _open_bytes(end: bytes) -> int:
    """Return the number of bytes at the end of a text that begin a character of UTF-8."""
    for size in range(1, len(end) + 1):
        try:
            end[-size:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return size
    return 0
