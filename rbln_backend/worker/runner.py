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

from rbln_backend.compiler.port import CompiledGraph
from rbln_backend.core import Phase, StepBatch, StepOutputs, StepResult, StepRound, UsefulRows
from rbln_backend.kv_cache.tensors import KvCaches
from rbln_backend.scheduler.output import (
    head_copies,
    moves_kv,
    page_moves,
    window_transfers,
    with_drafts,
)
from rbln_backend.vllm_compat.surface import (
    EMPTY_MODEL_RUNNER_OUTPUT,
    AsyncModelRunnerOutput,
    DraftTokenIds,
    GrammarOutput,
    LogprobsLists,
    LogprobsTensors,
    ModelRunnerOutput,
    SamplingMetadata,
    SchedulerOutput,
    VllmConfig,
)
from rbln_backend.worker.batch import PlainRows, RequestBatches
from rbln_backend.worker.device_sampler import DeviceSampler
from rbln_backend.worker.drafting import Drafting
from rbln_backend.worker.graph_set import GraphSet, StepGraph
from rbln_backend.worker.inputs import AdapterRows, DecodeRows, RowOrder, StepInputs
from rbln_backend.worker.metrics import StepMetrics
from rbln_backend.worker.ranks import SoleStage, Stage, StepAgreement
from rbln_backend.worker.sampling import (
    GrammarMask,
    PromptLogprobs,
    RowSampler,
    TokenPicks,
    with_generators,
)
from rbln_backend.worker.verification import Verification


class _PendingStep(NamedTuple):
    """A step after ``execute_model`` and before ``sample_tokens``."""

    scheduled: SchedulerOutput
    batch: StepBatch
    outputs: StepOutputs
    """Not read for a chunk that ends no prompt."""
    prompt_logprobs: dict[str, LogprobsTensors | None]
    started: float


class RblnModelRunner:
    """Runs one static-shape graph per step and samples on the host."""

    def __init__(
        self,
        *,
        steps: StepRunner,
        sampler: RowSampler,
        picks: TokenPicks | None,
        draws: DeviceSampler | None,
        prompt_logprobs: PromptLogprobs,
        grammar_mask: GrammarMask,
        verification: Verification,
        drafting: Drafting,
    ) -> None:
        """``picks``: the tokens of greedy steps; ``draws``: those of sampled ones. None where the
        sampler takes them.
        """
        self.steps = steps
        self._batches = steps.batches
        self._sampler = sampler
        self._picks, self._draws = picks, draws
        self._verification = verification
        self._drafting = drafting
        self._prompt_logprobs = prompt_logprobs
        self._grammar_mask = grammar_mask
        self._pending: _PendingStep | None = None
        self._names: list[str] = []
        self._rows: dict[str, int] = {}
        """Names and rows of the requests of the latest step, as results have them."""

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run the step's graph; return None if it ran, because ``sample_tokens`` has the result.

        An engine with several steps in flight takes results from ``sample_tokens`` alone.
        """
        started = time.perf_counter()
        self._drafting.start_step(scheduled)
        result = self.steps.run_plain(scheduled)
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
        result = self.steps.run(scheduled)
        if result is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        batch, outputs = result
        self._take_names(batch)
        self._pending = _PendingStep(
            scheduled,
            batch,
            outputs,
            prompt_logprobs=self._collect_prompt_logprobs(batch, outputs),
            started=started,
        )
        return None

    def synchronize(self) -> None:
        """Do nothing: the device runs no step between two calls."""

    def sample_tokens(
        self, grammar: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Mask, sample and record; return None when the last step ran nothing."""
        pending, self._pending = self._pending, None
        if pending is None:
            return None
        batch, logprobs = pending.batch, None
        if not batch.samples:
            self._drafting.end_chunk(batch, pending.outputs)
            return self._reply([[] for _ in range(batch.num_reqs)], None, pending)
        token_ids = None if grammar is not None else self._take_picked(batch, pending.outputs)
        known = token_ids
        if token_ids is None or known is None:
            token_ids, logprobs = self._sample_logits(pending, grammar)
            # A request that gets ``NO_TOKEN`` ends, but a draft model may still read it.
            known = [[max(token, 0) for token in own] for own in token_ids]
        seconds = time.perf_counter() - pending.started
        self._drafting.end_step(batch, pending.outputs, known, seconds)
        return self._reply(token_ids, logprobs, pending)

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return drafts for the next step; None without speculation or sampled tokens."""
        return self._drafting.take()

    def _take_picked(self, batch: StepBatch, outputs: StepOutputs) -> list[list[int]] | None:
        """Record and return picked or drawn tokens; None if the logits of any are needed here."""
        if batch.phase is Phase.VERIFY:
            return self._verification.take_picked(batch, outputs)
        metadata = batch.input_batch.sampling_metadata
        if self._picks is not None and self._sampler.takes_largest(metadata):
            token_ids = self._picks(outputs, batch.num_reqs)
        elif self._draws is not None and self._is_drawn(self._draws, metadata):
            token_ids = self._draws.draw(outputs, batch.num_reqs, metadata)
        else:
            return None
        for row in batch.unfinished:
            token_ids[row] = []
        self._batches.record(batch, token_ids)
        return token_ids

    def _is_drawn(self, draws: DeviceSampler, metadata: SamplingMetadata) -> bool:
        return self._sampler.takes_logits_alone(metadata) and draws.takes(metadata)

    @torch.inference_mode()
    def _sample_logits(
        self, step: _PendingStep, grammar: GrammarOutput | None
    ) -> tuple[list[list[int]], LogprobsLists | None]:
        batch = step.batch
        logits = _real_rows(batch, step.outputs[0])
        if grammar is not None:
            logits = self._grammar_mask.apply(step.scheduled, grammar, batch.input_batch, logits)
        return self._sample(batch, logits)

    def _sample(
        self, batch: StepBatch, logits: Tensor
    ) -> tuple[list[list[int]], LogprobsLists | None]:
        """Return the tokens of each request, none for prompts that continue."""
        if batch.phase is Phase.VERIFY:
            return self._verification.sample(batch, logits)
        metadata = batch.input_batch.sampling_metadata
        if batch.unfinished:
            metadata = with_generators(metadata, [*{*range(batch.num_reqs)} - {*batch.unfinished}])
        sampled = self._sampler(logits=logits, sampling_metadata=metadata)
        token_ids: list[list[int]] = sampled.sampled_token_ids.tolist()
        for row in batch.unfinished:
            token_ids[row] = []
        self._batches.record(batch, token_ids)
        logprobs = sampled.logprobs_tensors
        return token_ids, logprobs.tolists() if logprobs is not None else None

    def _collect_prompt_logprobs(
        self, batch: StepBatch, outputs: StepOutputs
    ) -> dict[str, LogprobsTensors | None]:
        collected: dict[str, LogprobsTensors | None] = {}
        counts = batch.counts or [1] * batch.num_reqs
        ends = accumulate(counts)
        for request_id, count, end in zip(batch.input_batch.req_ids, counts, ends, strict=True):
            request = self._batches.requests[request_id]
            params = request.sampling_params
            if params is None or params.prompt_logprobs is None:
                continue
            own = outputs[1][end - count :] if batch.phase is Phase.PREFILL else None
            table = self._prompt_logprobs.collect(request, own, count)
            if table is not None:
                collected[request_id] = table
        return collected

    def _take_names(self, batch: StepBatch) -> None:
        """Set the names and rows of the results of ``batch`` and of plain steps after it."""
        self._names = list(batch.input_batch.req_ids)
        self._rows = dict(batch.input_batch.req_id_to_index)
        for request in batch.decode_prefill:
            # All of them share the row behind the last, which has no token and no log-probability.
            self._names.append(request.req_id)
            self._rows[request.req_id] = batch.num_reqs

    def _reply(
        self, token_ids: list[list[int]], logprobs: LogprobsLists | None, step: _PendingStep
    ) -> ModelRunnerOutput:
        output = ModelRunnerOutput(
            req_ids=self._names,
            req_id_to_index=self._rows,
            sampled_token_ids=[*token_ids, []] if step.batch.decode_prefill else token_ids,
            logprobs=logprobs,
            prompt_logprobs_dict=step.prompt_logprobs,
        )
        return with_drafts(output, self._drafting.take()) if self._drafting.by_step else output


def _real_rows(batch: StepBatch, logits: Tensor) -> Tensor:
    """Return logits [bucket, V] or [bucket, length, V] without padding, request by request."""
    if batch.phase is not Phase.VERIFY:
        return logits if logits.shape[0] == batch.num_reqs else logits[: batch.num_reqs]
    return torch.cat([logits[row, : 1 + len(drafts)] for row, drafts in enumerate(batch.drafts)])


# Row numbers of any decode batch; sliced, so that no step allocates an array.
_ROWS = np.arange(1 << 16)


class StepRunner:
    """Runs the static-shape graph of a scheduler output."""

    def __init__(
        self,
        *,
        batches: RequestBatches,
        graphs: GraphSet,
        adapters: AdapterRows | None,
        kv_caches: KvCaches,
        metrics: StepMetrics,
        stage: Stage,
        agreement: StepAgreement,
        rows: RowOrder,
    ) -> None:
        self.batches = batches
        self._graphs = graphs
        self._adapters = adapters
        self._kv_caches = kv_caches
        self._metrics = metrics
        self._stage = stage
        self._agreement = agreement
        self._rows = rows
        self._filled: tuple[StepInputs, StepBatch] | None = None
        """The inputs that hold a decode step, and that step."""
        # Other ranks take part in each step: of experts, or as stages of a pipeline.
        self._is_sole = agreement.ranks == 1 and isinstance(stage, SoleStage)

    def run(self, scheduled: SchedulerOutput) -> StepResult | None:
        """Run the step's graph; return None when nothing is scheduled."""
        transfers, pages = window_transfers(scheduled), page_moves(scheduled)
        self._kv_caches.load_pages(pages.loads)
        self._prepare_blocks(scheduled)
        self._kv_caches.restore_windows(transfers)
        batch = self.batches.apply(scheduled)
        if batch is None:
            self._kv_caches.store_pages(pages.stores)
            return None
        outputs = self._run_rounds(batch)
        self._kv_caches.store_windows(transfers)
        self._kv_caches.store_pages(pages.stores)
        return StepResult(batch, outputs)

    def run_plain(self, scheduled: SchedulerOutput) -> StepResult | None:
        """Run a decode step that differs from the previous step by its tokens alone.

        Returns None, with nothing changed, for any other step. The result has the batch of the
        previous step, the same object.
        """
        plain, filled = self.batches.plain, self._filled
        if plain is None or filled is None or plain.batch is not filled[1]:
            return None
        if not self._is_sole or moves_kv(scheduled):
            return None
        count = plain.batch.num_reqs
        step = self._graphs.select(Phase.DECODE, count)
        if step.inputs is not filled[0] or not plain.follows(scheduled):
            return None
        batch = plain.advance(scheduled)
        self._advance(step.inputs, plain)
        if self._adapters is not None:
            self._adapters.fill(step.inputs, batch)
        outputs = StepOutputs(self._run(step, batch), self._rows.restore)
        return StepResult(batch, outputs)

    def _advance(self, inputs: StepInputs, plain: PlainRows) -> None:
        inputs.advance_decode(self._rows.rearrange(plain.tokens))
        if not plain.grown:
            return
        tables = plain.batch.input_batch.block_table.block_tables
        for row in plain.grown:
            place = self._rows.place(row)
            for group, table in zip(inputs.groups, tables, strict=True):
                group.put_blocks(place, table.get_numpy_array()[row])

    def wait(self) -> None:
        """Do nothing: a step has ended when it returns."""

    @torch.inference_mode()
    def run_idle(self) -> None:
        """Run the graphs of the other data-parallel ranks over padding: their collectives wait."""
        self._run_rounds(None)

    def _run_rounds(self, batch: StepBatch | None) -> StepOutputs:
        """Return the outputs of the round that runs this rank's own batch."""
        own = StepOutputs(())
        for step_round in self._agreement.rounds(batch):
            if batch is not None and step_round.phase is batch.phase:
                own = self._run_own(step_round, batch)
                continue
            # A run may overwrite the outputs of another.
            own = own.cloned()
            self._run_padding(step_round)
        return own

    def _run_own(self, step_round: StepRound, batch: StepBatch) -> StepOutputs:
        step = self._graphs.select(step_round.phase, step_round.size, step_round.length)
        self._fill(step.inputs, batch)
        if self._adapters is not None:
            self._adapters.fill(step.inputs, batch)
        step.inputs.fill_mask(step_round.counts)
        self._stage.receive(step.inputs)
        outputs = self._run(step, batch)
        # The next stage arranges its rows in the same order.
        self._stage.send(step.inputs, outputs)
        if batch.phase is Phase.VERIFY:
            rows, length = self._rows, step.spec.length
            return StepOutputs(outputs, lambda o: rows.restore(o.unflatten(0, (-1, length))))
        return StepOutputs(outputs, None if batch.phase.takes_chunk else self._rows.restore)

    def _run_padding(self, step_round: StepRound) -> None:
        step = self._graphs.select(step_round.phase, step_round.size)
        self._filled = None
        step.inputs.fill_idle()
        step.inputs.fill_mask(step_round.counts)
        self._run(step, None)

    def _prepare_blocks(self, scheduled: SchedulerOutput) -> None:
        if scheduled.kv_cache_block_copies:
            self._kv_caches.copy_heads(head_copies(scheduled))

    def _run(self, step: StepGraph, batch: StepBatch | None) -> Sequence[Tensor]:
        """Run a graph for ``batch``, None for padding alone; count its time."""
        started = time.perf_counter()
        outputs = step.graph.run(self._useful(batch))
        self._count(step, batch, time.perf_counter() - started)
        return outputs

    def _count(self, step: StepGraph, batch: StepBatch | None, seconds: float) -> None:
        rows, tokens = (0, 0) if batch is None else (batch.num_rows, batch.num_tokens)
        self._metrics.record(step.spec, rows, tokens, seconds)

    def _useful(self, batch: StepBatch | None) -> UsefulRows | None:
        """Return the rows of a graph that ``batch`` needs; None: all.

        Data-parallel ranks gather the rows of all: there, padding is in between.
        """
        if batch is None or self._agreement.ranks > 1:
            return None
        useful = batch.useful
        if useful is None or not self._is_sole or self._reads_hidden(batch):
            return useful
        return useful._replace(reads_hidden=False)

    def _reads_hidden(self, batch: StepBatch) -> bool:
        """Return whether a draft model or `prompt_logprobs` may read hidden states."""
        if self._stage.part.keeps_hidden:
            return True
        names = batch.input_batch.req_ids[: batch.num_reqs]
        params = (self.batches.requests[name].sampling_params for name in names)
        return any(p is not None and p.prompt_logprobs is not None for p in params)

    def _fill(self, inputs: StepInputs, batch: StepBatch) -> None:
        held, count = batch.input_batch, batch.num_reqs
        tables = [table.get_numpy_array() for table in held.block_table.block_tables]
        num_computed = held.num_computed_tokens_cpu[:count]
        if batch.phase.takes_chunk:
            own = zip(held.token_ids_cpu, num_computed, batch.counts, strict=False)
            prompts = [tokens[start : start + taken] for tokens, start, taken in own]
            inputs.fill_prefill(prompts, num_computed, [table[:count] for table in tables])
            return
        tokens = held.token_ids_cpu[_ROWS[:count], num_computed]
        rows = DecodeRows(tokens, num_computed, [table[:count] for table in tables])
        if batch.decode_prefill:
            rows = rows.with_prefills(batch.decode_prefill)
        if batch.phase is Phase.VERIFY:
            rows = self._rows.arrange(rows, inputs.spec.bucket)
            drafts = [*batch.drafts, *((),) * len(batch.decode_prefill)]
            inputs.fill_verify(rows, self._rows.rearrange(drafts))
            return
        inputs.fill_decode(*self._rows.arrange(rows, inputs.spec.bucket))
        self._filled = inputs, batch


class StepLoop(NamedTuple):
    """Makes the parts of a step loop, with the arguments of their base classes."""

    steps: Callable[..., StepRunner]
    runner: Callable[..., RblnModelRunner]


def step_loop(config: VllmConfig, *, runs_on_host: bool, replies: bool) -> StepLoop:
    """Return the classes for a rank on a device that ``runs_on_host`` or beside it.

    A rank that does not reply to the engine has nothing to do beside a step: it ends each step
    where it began, so that a failure ends its process instead of leaving the others waiting.
    """
    if not config.scheduler_config.async_scheduling or not replies:
        return StepLoop(StepRunner, RblnModelRunner)
    launch = LaunchInThread() if runs_on_host else launch_on_device
    return StepLoop(partial(OverlappedStepRunner, launch=launch), AsyncModelRunner)


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
        """As ``Launch``."""
        return self._thread.submit(_timed, graph, useful).result


def _timed(graph: CompiledGraph, useful: UsefulRows | None) -> EndedRun:
    started = time.perf_counter()
    outputs = graph.run(useful)
    return EndedRun(outputs, time.perf_counter() - started)


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


class OverlappedStepRunner(StepRunner):
    """A step runner whose graphs may still run when a step returns; one step at a time."""

    def __init__(self, *, launch: Launch, **parts: Any) -> None:
        """``parts``: those of ``StepRunner``, of an engine without pipeline stages."""
        super().__init__(**parts)
        self._launch = launch
        self._late: LateOutputs | None = None

    def wait(self) -> None:
        """Wait for the end of the latest step; count its time."""
        late, self._late = self._late, None
        if late is not None:
            late.wait()

    def _run(self, step: StepGraph, batch: StepBatch | None) -> Sequence[Tensor]:
        """Launch a graph for ``batch``; its time is counted by ``wait``."""
        wait = self._launch(step.graph, self._useful(batch))
        self._late = LateOutputs(wait, partial(self._count, step, batch))
        return self._late


class AsyncModelRunner(RblnModelRunner):
    """Returns from a step while the device runs it, and ends it before the next one begins.

    The scheduler has planned the next step without the tokens of this one. Here they are known:
    they are read, or sampled, and recorded before the next step is applied. So sampling, seeds,
    penalties and grammars are those of an engine without asynchronous scheduling. A graph's
    outputs are read before it runs again, which overwrites them.
    """

    _in_flight: StepInFlight | None = None

    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput | None:
        """As ``RblnModelRunner.execute_model``, after the end of the step before."""
        self.synchronize()
        return super().execute_model(scheduled)

    def sample_tokens(
        self, grammar: GrammarOutput | None
    ) -> ModelRunnerOutput | AsyncModelRunnerOutput | None:
        """Return the step's result to read later; None when the last step ran nothing."""
        if self._pending is None:
            return None
        self._in_flight = StepInFlight(lambda: self._end(grammar))
        return self._in_flight

    def synchronize(self) -> None:
        """Wait for the step that the device runs, and record its tokens."""
        step, self._in_flight = self._in_flight, None
        if step is not None:
            step.get_output()

    def _end(self, grammar: GrammarOutput | None) -> ModelRunnerOutput:
        self.steps.wait()
        return cast("ModelRunnerOutput", super().sample_tokens(grammar))


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


class RelayRunner:
    """Runs the stage's graph; the next scheduler output has the tokens of the last stage."""

    def __init__(self, steps: StepRunner) -> None:
        self.steps = steps

    @torch.inference_mode()
    def execute_model(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        """Run the stage's graph; the executor takes the result from the last stage."""
        self.steps.run(scheduled)
        return EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammar: GrammarOutput | None) -> None:
        """Return None: the last stage samples."""
