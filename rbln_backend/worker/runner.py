"""The step loop: scheduler output in, sampled tokens out.

``rbln_backend.core`` describes a step. No configuration is read during a step.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    DraftTokenIds,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
)

from rbln_backend.core import HeadCopy, Phase, StepBatch, StepOutputs, StepResult, UsefulRows
from rbln_backend.devices.port import CompiledGraph
from rbln_backend.kv_cache.tensors import KvCaches
from rbln_backend.scheduler.steps import MovingSchedulerOutput, with_drafts
from rbln_backend.worker.batch import RequestBatches
from rbln_backend.worker.device_sampler import DeviceSampler
from rbln_backend.worker.drafting import Drafting
from rbln_backend.worker.graph_functions import ModelPart
from rbln_backend.worker.graph_set import GraphSet, StepGraph
from rbln_backend.worker.inputs import AdapterRows, DecodeRows, LongestFirst
from rbln_backend.worker.metrics import StepMetrics
from rbln_backend.worker.ranks import DataRanks, PipelineStage
from rbln_backend.worker.sampling import (
    GrammarMask,
    PromptLogprobs,
    RowSampler,
    TokenPicks,
    with_generators,
)
from rbln_backend.worker.verification import Verification

# Row numbers of any decode batch; sliced, so that no step allocates an array.
_ROWS = np.arange(1 << 16)


class EndedRun(NamedTuple):
    """A run of a graph that the device has ended."""

    outputs: tuple[Tensor, ...]
    seconds: float
    """From the launch to the end."""


Wait = Callable[[], EndedRun]
Launch = Callable[[CompiledGraph, UsefulRows | None], Wait]
"""Starts ``CompiledGraph.run`` and returns a function that waits for its end."""


def launch_on_device(graph: CompiledGraph, useful: UsefulRows | None) -> Wait:
    """Launch a graph of a device beside the host; its call may return before the device ends.

    The end is known by reading the picked tokens, the last output, int32 [rows].
    """
    started = time.perf_counter()
    outputs = graph.run(useful)

    def wait() -> EndedRun:
        outputs[-1].cpu()
        return EndedRun(outputs, time.perf_counter() - started)

    return wait


class LaunchInThread:
    """Launches graphs of the emulated device in a thread; kernels leave the interpreter free."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="emulated-device")

    def __call__(self, graph: CompiledGraph, useful: UsefulRows | None) -> Wait:
        def run() -> EndedRun:
            started = time.perf_counter()
            outputs = graph.run(useful)
            return EndedRun(outputs, time.perf_counter() - started)

        return self._thread.submit(run).result


class LateOutputs(Sequence[Tensor]):
    """The outputs of a run, each [...]; reading one waits for the end of the run."""

    def __init__(self, wait: Wait, ended: Callable[[float], None]) -> None:
        """``ended`` is called once, with the seconds of the run."""
        self._wait, self._ended = wait, ended
        self._outputs: tuple[Tensor, ...] | None = None

    def wait(self) -> tuple[Tensor, ...]:
        """Return the outputs [...] after the end of the run."""
        if self._outputs is None:
            self._outputs, seconds = self._wait()
            self._ended(seconds)
        return self._outputs

    def __getitem__(self, number: Any) -> Any:
        return self.wait()[number]

    def __len__(self) -> int:
        return len(self.wait())


class StepInFlight(AsyncModelRunnerOutput):
    """Ends a step where its result is read first: by the engine, or by the step after it.

    The engine may read from another thread than the one that runs steps.
    """

    def __init__(self, end: Callable[[], ModelRunnerOutput]) -> None:
        """``end`` waits for the device, samples and records; it is called once."""
        self._end = end
        self._lock = threading.Lock()
        self._ended: Future[ModelRunnerOutput] = Future()

    def get_output(self) -> ModelRunnerOutput:
        """Return the result, after the device's end of the step, or raise what ended it."""
        with self._lock:
            if not self._ended.done():
                try:
                    self._ended.set_result(self._end())
                except BaseException as error:
                    self._ended.set_exception(error)
                    raise
            return self._ended.result()


class StepRunner:
    """Runs the static-shape graph of a scheduler output, up to the graph's outputs."""

    def __init__(  # noqa: PLR0913 (an object for these would have one user)
        self,
        *,
        batches: RequestBatches,
        graphs: GraphSet,
        kv_caches: KvCaches,
        metrics: StepMetrics,
        part: ModelPart,
        adapters: AdapterRows | None,
        stage: PipelineStage | None,
        ranks: DataRanks | None,
        rows: LongestFirst | None,
        launch: Launch | None,
    ) -> None:
        """``part``: of the model, on this rank. The others are None where there is no such thing.

        ``ranks``: those that share experts. ``rows``: the order of decode steps, None for the
        scheduler's. ``launch``: starts graphs that may still run when a step returns, one step at a
        time.
        """
        self.batches = batches
        self._graphs = graphs
        self._kv_caches = kv_caches
        self._metrics = metrics
        self._part = part
        self._adapters = adapters
        self._stage, self._ranks = stage, ranks
        self._rows = rows
        self._restore: Callable[[Any], Any] | None = None if rows is None else rows.restore
        self._launch = launch
        self._late: LateOutputs | None = None
        """The outputs of a graph that may still run."""
        self._filled: tuple[StepGraph, StepBatch] | None = None
        """The graph whose inputs hold a decode step, and that step."""
        # Other ranks take part in each step: of experts, or as stages of a pipeline.
        self._is_sole = stage is None and ranks is None

    def run(self, scheduled: SchedulerOutput) -> StepResult | None:
        """Run the step's graph; return None when nothing is scheduled."""
        caches = self._kv_caches
        moves = scheduled if isinstance(scheduled, MovingSchedulerOutput) else None
        if moves is not None:
            caches.load_pages(moves.page_moves.loads)
        if scheduled.kv_cache_block_copies:
            # ``RblnKvCacheManager`` has made them.
            caches.copy_heads(cast("Sequence[HeadCopy]", scheduled.kv_cache_block_copies))
        if moves is not None:
            caches.restore_windows(moves.window_transfers)
        batch = self.batches.apply(scheduled)
        result = None if batch is None else StepResult(batch, self._run_rounds(batch))
        if moves is not None:
            if result is not None:
                caches.store_windows(moves.window_transfers)
            caches.store_pages(moves.page_moves.stores)
        return result

    def run_plain(self, scheduled: SchedulerOutput) -> StepResult | None:
        """Run a decode step that differs from the previous step by its tokens alone.

        Returns None, with nothing changed, for any other step. The result has the batch of the
        previous step, the same object.
        """
        plain, filled = self.batches.plain, self._filled
        if plain is None or filled is None or plain.batch is not filled[1] or not self._is_sole:
            return None
        if scheduled.kv_cache_block_copies or isinstance(scheduled, MovingSchedulerOutput):
            return None
        if not plain.follows(scheduled):
            return None
        step, batch = filled
        plain.advance(scheduled)
        rows, tokens = self._rows, plain.tokens
        step.inputs.advance_decode(tokens if rows is None else rows.rearrange(tokens))
        if plain.grown:
            tables = batch.input_batch.block_table.block_tables
            for row in plain.grown:
                graph_row = row if rows is None else rows.place(row)
                for group, table in zip(step.inputs.groups, tables, strict=True):
                    group.put_blocks(graph_row, table.get_numpy_array()[row])
        if self._adapters is not None:
            self._adapters.fill(step.inputs, batch)
        return StepResult(batch, StepOutputs(self._run(step, batch), self._restore))

    @torch.inference_mode()
    def run_idle(self) -> None:
        """Run the graphs of the other data-parallel ranks over padding: their collectives wait."""
        self._run_rounds(None)

    def _run_rounds(self, batch: StepBatch | None) -> StepOutputs:
        """Return the outputs of the round that runs this rank's own batch."""
        outputs = StepOutputs(())
        if self._ranks is None:
            if batch is None:
                return outputs
            count = batch.num_tokens if batch.phase.takes_chunk else batch.size
            return self._run_batch(batch, batch.size, (count,))
        for step_round in self._ranks.rounds(batch):
            if batch is not None and step_round.phase is batch.phase:
                outputs = self._run_batch(batch, step_round.size, step_round.counts)
                continue
            # A run may overwrite the outputs of another.
            outputs = outputs.cloned()
            step = self._graphs.select(step_round.phase, step_round.size)
            self._filled = None
            step.inputs.fill_idle()
            step.inputs.fill_mask(step_round.counts)
            self._run(step, None)
        return outputs

    def _run_batch(self, batch: StepBatch, size: int, counts: Sequence[int]) -> StepOutputs:
        """Run ``batch`` in a graph of ``size``; ``counts``: tokens or rows of each rank."""
        step = self._graphs.select(batch.phase, size, batch.length)
        self._fill(step, batch)
        if self._adapters is not None:
            self._adapters.fill(step.inputs, batch)
        step.inputs.fill_mask(counts)
        if self._stage is not None:
            self._stage.receive(step.inputs)
        outputs = self._run(step, batch)
        if self._stage is not None:
            # The next stage arranges its rows in the same order.
            self._stage.send(step.inputs, outputs)
        if batch.phase is Phase.VERIFY:
            rows, shape = self._rows, (-1, step.spec.length)
            if rows is None:
                return StepOutputs(outputs, lambda o: o.unflatten(0, shape))
            return StepOutputs(outputs, lambda o: rows.restore(o.unflatten(0, shape)))
        return StepOutputs(outputs, None if batch.phase.takes_chunk else self._restore)

    def _run(self, step: StepGraph, batch: StepBatch | None) -> Sequence[Tensor]:
        """Run or launch a graph for ``batch``, None for padding alone; count its time."""
        rows = tokens = 0
        useful = None
        if batch is not None:
            rows, tokens = batch.num_rows, batch.num_tokens
            if batch.phase is Phase.PREFILL:
                useful = self._useful(batch)
        if self._launch is not None:
            wait = self._launch(step.graph, useful)
            count = partial(self._metrics.record, step.spec, rows, tokens)
            self._late = LateOutputs(wait, count)
            return self._late
        started = time.perf_counter()
        outputs = step.graph.run(useful)
        self._metrics.record(step.spec, rows, tokens, time.perf_counter() - started)
        return outputs

    def _useful(self, batch: StepBatch) -> UsefulRows | None:
        """Return the rows of a graph that a chunk needs; None: all.

        Data-parallel ranks gather the rows of all: there, padding is in between.
        """
        if self._ranks is not None:
            return None
        useful = batch.useful
        if useful is None or not self._is_sole or self._part.keeps_hidden:
            return useful
        for name in batch.input_batch.req_ids[: batch.num_reqs]:
            params = self.batches.requests[name].sampling_params
            if params is not None and params.prompt_logprobs is not None:
                return useful
        return useful._replace(reads_hidden=False)

    def _fill(self, step: StepGraph, batch: StepBatch) -> None:
        inputs, requests, count = step.inputs, batch.input_batch, batch.num_reqs
        tables = [table.get_numpy_array() for table in requests.block_table.block_tables]
        num_computed = requests.num_computed_tokens_cpu[:count]
        if batch.phase.takes_chunk:
            chunks = zip(requests.token_ids_cpu, num_computed, batch.counts, strict=False)
            prompts = [tokens[start : start + length] for tokens, start, length in chunks]
            inputs.fill_prefill(prompts, num_computed, [table[:count] for table in tables])
            return
        tokens = requests.token_ids_cpu[_ROWS[:count], num_computed]
        rows = DecodeRows(tokens, num_computed, [table[:count] for table in tables])
        if batch.decode_prefill:
            rows = rows.with_prefills(batch.decode_prefill)
        order = self._rows
        if order is not None:
            rows = order.arrange(rows, inputs.spec.bucket)
        if batch.phase is Phase.VERIFY:
            drafts = [*batch.drafts, *((),) * len(batch.decode_prefill)]
            inputs.fill_verify(rows, drafts if order is None else order.rearrange(drafts))
            return
        inputs.fill_decode(*rows)
        self._filled = step, batch


class _PendingStep(NamedTuple):
    """A step after ``execute_model`` and before ``sample_tokens``."""

    scheduled: SchedulerOutput
    batch: StepBatch
    outputs: StepOutputs
    """Not read for a chunk that ends no prompt."""
    prompt_logprobs: dict[str, LogprobsTensors | None]
    started: float


class RblnModelRunner(StepRunner):
    """Runs the steps of a generating model, and samples on the host.

    With ``launch`` (`--async-scheduling`) it returns from a step while the device runs it, and ends
    it before the next one begins. The scheduler has planned the next step without the tokens of
    this one. Here they are known: they are read, or sampled, and recorded before the next step is
    applied. So sampling, seeds, penalties and grammars are those of an engine without asynchronous
    scheduling. A graph's outputs are read before it runs again, which overwrites them.
    """

    def __init__(
        self,
        *,
        sampler: RowSampler,
        picks: TokenPicks | None,
        draws: DeviceSampler | None,
        prompt_logprobs: PromptLogprobs,
        grammar_mask: GrammarMask,
        verification: Verification,
        drafting: Drafting | None,
        **step: Any,
    ) -> None:
        """``picks``: the tokens of greedy steps; ``draws``: those of sampled ones. None where the
        sampler takes them. ``drafting``: None where this rank proposes no drafts. ``step``: the
        arguments of ``StepRunner``.
        """
        super().__init__(**step)
        self._sampler = sampler
        self._picks, self._draws = picks, draws
        self._verification = verification
        self._drafting = drafting
        self._prompt_logprobs = prompt_logprobs
        self._grammar_mask = grammar_mask
        self._pending: _PendingStep | None = None
        self._in_flight: StepInFlight | None = None
        self._names: list[str] = []
        self._name_rows: dict[str, int] = {}
        """Names and rows of the requests of the latest step in full, and of plain steps after it,
        as results have them."""

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the step's graph; return None if it ran, because ``sample_tokens`` has the result.

        An engine with several steps in flight takes results from ``sample_tokens`` alone.
        """
        if self._in_flight is not None:
            self.synchronize()
        started = time.perf_counter()
        if self._drafting is not None:
            self._drafting.start_step(scheduled)
        result = self.run_plain(scheduled)
        if result is None:
            return self._execute_in_full(scheduled, started)
        # No prompt ends in a plain step.
        batch, outputs = result
        self._pending = _PendingStep(scheduled, batch, outputs, {}, started)
        return None

    @torch.inference_mode()
    def _execute_in_full(
        self, scheduled: SchedulerOutput, started: float
    ) -> ModelRunnerOutput | None:
        result = self.run(scheduled)
        if result is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch, outputs = result
        self._names = list(batch.input_batch.req_ids)
        self._name_rows = dict(batch.input_batch.req_id_to_index)
        for request in batch.decode_prefill:
            # All of them share the row behind the last, which has no token and no log-probability.
            self._names.append(request.req_id)
            self._name_rows[request.req_id] = batch.num_reqs
        logprobs = self._collect_prompt_logprobs(batch, outputs)
        self._pending = _PendingStep(scheduled, batch, outputs, logprobs, started)
        return None

    def sample_tokens(
        self, grammar: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Mask, sample and record; return None when the last step ran nothing.

        With ``launch``, return the step's result to read later.
        """
        step, self._pending = self._pending, None
        if step is None:
            return None
        if self._launch is None:
            return self._end(step, grammar)
        self._in_flight = StepInFlight(lambda: self._end(step, grammar))
        return self._in_flight

    def synchronize(self) -> None:
        """Wait for the step that the device runs, if any, and record its tokens."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            step.get_output()

    def _end(self, step: _PendingStep, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        late, self._late = self._late, None
        if late is not None:
            # The time of the launch is counted.
            late.wait()
        batch, drafting, logprobs = step.batch, self._drafting, None
        token_ids: list[list[int]] | None
        if not batch.samples:
            token_ids = [[] for _ in range(batch.num_reqs)]
            if drafting is not None:
                drafting.end_chunk(batch, step.outputs)
        else:
            token_ids = None if grammar is not None else self._take_picked(batch, step.outputs)
            if token_ids is None:
                token_ids, logprobs = self._sample_logits(step, grammar)
            if drafting is not None:
                # A request that gets ``NO_TOKEN`` ends, but a draft model may still read it.
                known = [[max(token, 0) for token in tokens] for tokens in token_ids]
                seconds = time.perf_counter() - step.started
                drafting.end_step(batch, step.outputs, known, seconds)
        output = ModelRunnerOutput(
            req_ids=self._names,
            req_id_to_index=self._name_rows,
            sampled_token_ids=[*token_ids, []] if batch.decode_prefill else token_ids,
            logprobs=logprobs,
            prompt_logprobs_dict=step.prompt_logprobs,
        )
        if drafting is not None and drafting.by_step:
            return with_drafts(output, drafting.take())
        return output

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return drafts for the next step; None without speculation or sampled tokens."""
        return None if self._drafting is None else self._drafting.take()

    def _take_picked(self, batch: StepBatch, outputs: StepOutputs) -> list[list[int]] | None:
        """Record and return picked or drawn tokens; None if the logits of any are needed here."""
        if batch.phase is Phase.VERIFY:
            return self._verification.take_picked(batch, outputs)
        metadata = batch.input_batch.sampling_metadata
        if not self._sampler.takes_logits_alone(metadata):
            return None
        if self._picks is not None and metadata.all_greedy:
            token_ids = self._picks(outputs, batch.num_reqs)
        elif self._draws is not None and self._draws.takes(metadata):
            token_ids = self._draws.draw(outputs, batch.num_reqs, metadata)
        else:
            return None
        for row in batch.unfinished:
            token_ids[row] = []
        self.batches.record(batch, token_ids)
        return token_ids

    @torch.inference_mode()
    def _sample_logits(
        self, step: _PendingStep, grammar: GrammarOutput | None
    ) -> tuple[list[list[int]], LogprobsLists | None]:
        """Return the tokens of each request, none for prompts that continue."""
        batch = step.batch
        logits = step.outputs[0]
        if batch.phase is Phase.VERIFY:
            # Of [bucket, length, V], request by request.
            rows = enumerate(batch.drafts)
            logits = torch.cat([logits[row, : 1 + len(drafts)] for row, drafts in rows])
        elif logits.shape[0] != batch.num_reqs:
            logits = logits[: batch.num_reqs]
        if grammar is not None:
            logits = self._grammar_mask.apply(step.scheduled, grammar, batch.input_batch, logits)
        if batch.phase is Phase.VERIFY:
            return self._verification.sample(batch, logits)
        metadata = batch.input_batch.sampling_metadata
        if batch.unfinished:
            metadata = with_generators(metadata, [*{*range(batch.num_reqs)} - {*batch.unfinished}])
        sampled = self._sampler(logits=logits, sampling_metadata=metadata)
        token_ids: list[list[int]] = sampled.sampled_token_ids.tolist()
        for row in batch.unfinished:
            token_ids[row] = []
        self.batches.record(batch, token_ids)
        logprobs = sampled.logprobs_tensors
        return token_ids, logprobs.tolists() if logprobs is not None else None

    def _collect_prompt_logprobs(
        self, batch: StepBatch, outputs: StepOutputs
    ) -> dict[str, LogprobsTensors | None]:
        collected: dict[str, LogprobsTensors | None] = {}
        counts = batch.counts or [1] * batch.num_reqs
        ends = accumulate(counts)
        for request_id, count, end in zip(batch.input_batch.req_ids, counts, ends, strict=True):
            request = self.batches.requests[request_id]
            params = request.sampling_params
            if params is None or params.prompt_logprobs is None:
                continue
            hidden = outputs[1][end - count :] if batch.phase is Phase.PREFILL else None
            table = self._prompt_logprobs.collect(request, hidden, count)
            if table is not None:
                collected[request_id] = table
        return collected


class RelayRunner(StepRunner):
    """A pipeline stage that is not the last; the scheduler's next output has the tokens."""

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run the stage's graph; the executor takes the result from the last stage."""
        self.run(scheduled)
        return EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar: GrammarOutput | None) -> None:
        """Return None: the last stage samples."""
