"""vLLM's output processor with queue timeouts, progress of prompts and their logprobs.

The scheduler ends a request that exceeds `--max-queue-s` with our stop reason. vLLM's serving
classes handle its error differently per endpoint, and some log a traceback. So the request's record
stores the error, which takes precedence in the front end.
"""

from __future__ import annotations

import dataclasses
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from msgspec.structs import replace
from vllm.exceptions import GracefulHTTPError
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.output_processor import OutputProcessorOutput
from vllm.v1.metrics.stats import IterationStats

from rbln_backend.api.requests import PROMPT_PROGRESS, QUEUE_TIMEOUT
from server.engine.open_characters import keep_prompt_out
from server.engine.spans import TracedOutputs
from server.errors import QueueTimeoutError, ServerError
from server.request.record import RequestRecord, record_var
from server.vllm.logprobs import AnswerLogprobs, TokenBytes, token_texts
from server.vllm.patches import (
    use_logprobs_processor,
    use_output_processor,
    use_token_texts,
)
from server.vllm.text_stream import DirectState, push_to

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState
    from vllm.v1.engine.parallel_sampling import ParentRequest

_REPORTS = (QUEUE_TIMEOUT, PROMPT_PROGRESS)
"""Stop reasons of outputs that are reports of our scheduler."""


class QueueAwareOutputs(TracedOutputs):
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
        if self._token_bytes is not None:
            keep_prompt_out(state, self._token_bytes)
        processor = state.logprobs_processor
        if processor is not None and (processor.num_logprobs, processor.num_prompt_logprobs) != (
            None,
            None,
        ):
            use_logprobs_processor(state, AnswerLogprobs.of(processor, state.detokenizer))
        # vLLM's generators write the log of outputs.
        if record is not None and record.direct.claim() and not self._logs_deltas:
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
        given = output.new_logprobs
        *rows, last = (given and given.slice_request(index, 1) for index in range(len(tokens)))
        parts = [
            EngineCoreOutput(output.request_id, [token], new_logprobs=row)
            for token, row in zip(tokens, rows, strict=False)
        ]
        parts[0] = replace(parts[0], events=output.events)
        return [*parts, replace(output, new_token_ids=tokens[-1:], new_logprobs=last, events=None)]

    def abort_requests(self, request_ids: Iterable[str], internal: bool) -> list[str]:
        """Abort as vLLM does, which counts no aborted request."""
        ids = list(request_ids)
        own = ids if internal else [i for name in ids for i in self.external_req_ids.get(name, ())]
        # The children of a request are aborted by a call of their own.
        states = [self.request_states[name] for name in own if name in self.request_states]
        aborted = super().abort_requests(ids, internal)
        self._count_aborted(states)
        return aborted

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
