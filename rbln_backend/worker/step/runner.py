"""One engine step up to the graph's outputs: the same for every kind of model."""

from __future__ import annotations

import time
from typing import NamedTuple

import numpy as np
from torch import Tensor

from rbln_backend.compiler.port import Phase
from rbln_backend.kv_cache.tensors import KvCaches
from rbln_backend.scheduler.output import window_transfers
from rbln_backend.vllm_compat.surface import SchedulerOutput
from rbln_backend.worker.step.adapter_rows import AdapterRows
from rbln_backend.worker.step.agreement import Round, StepAgreement
from rbln_backend.worker.step.batches import RequestBatches, StepWork
from rbln_backend.worker.step.graph_set import GraphSet, StepGraph
from rbln_backend.worker.step.inputs import DecodeRows, RowOrder, StepInputs
from rbln_backend.worker.step.metrics import StepMetrics
from rbln_backend.worker.step.stage import Stage

# Row numbers of any decode batch; sliced, so that no step makes its own.
_ROWS = np.arange(1 << 16)


class StepResult(NamedTuple):
    """What ran, and the graph's outputs; the next run may overwrite them.

    Logits are [bucket, V], or [bucket, length, V] where drafts are checked.
    """

    work: StepWork
    outputs: tuple[Tensor, ...]
    seconds: float
    """What the graph took, its inputs included."""


class StepRunner:
    """Scheduler output in, one static-shape graph's outputs out."""

    def __init__(
        self,
        *,
        batches: RequestBatches,
        graphs: GraphSet,
        adapters: AdapterRows,
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

    def run(self, scheduled: SchedulerOutput) -> StepResult | None:
        """Run the step's graph; None when nothing is scheduled."""
        transfers = window_transfers(scheduled)
        self._prepare_blocks(scheduled)
        self._kv_caches.restore_windows(transfers)
        work = self.batches.apply(scheduled)
        if work is None:
            return None
        started = time.perf_counter()
        outputs = self._run_rounds(work)
        seconds = time.perf_counter() - started
        self._kv_caches.store_windows(transfers)
        return StepResult(work, outputs, seconds)

    def run_idle(self) -> None:
        """Take part in what the other data-parallel ranks run; they wait for it."""
        self._run_rounds(None)

    def _run_rounds(self, work: StepWork | None) -> tuple[Tensor, ...]:
        """Return the outputs of the round that is this rank's own."""
        own: tuple[Tensor, ...] = ()
        for step_round in self._agreement.rounds(work):
            if work is not None and step_round.phase is work.phase:
                own = self._run_own(step_round, work)
                continue
            # A run may overwrite the outputs of another.
            own = tuple(output.clone() for output in own)
            self._run_padding(step_round)
        return own

    def _run_own(self, step_round: Round, work: StepWork) -> tuple[Tensor, ...]:
        step = self._graphs.select(step_round.phase, step_round.size, step_round.length)
        self._fill(step.inputs, work)
        self._adapters.fill(step.inputs, work)
        step.inputs.fill_mask(step_round.counts)
        self._stage.receive(step.inputs)
        outputs = self._run(step, work.num_rows, work.num_tokens)
        # The next stage orders its rows likewise.
        self._stage.hand_on(outputs)
        if work.phase is Phase.VERIFY:
            return tuple(output.unflatten(0, (-1, step.spec.length)) for output in outputs)
        return outputs if work.phase.takes_chunk else self._rows.restore(outputs)

    def _run_padding(self, step_round: Round) -> None:
        step = self._graphs.select(step_round.phase, step_round.size)
        step.inputs.fill_idle()
        step.inputs.fill_mask(step_round.counts)
        self._run(step, 0, 0)

    def _prepare_blocks(self, scheduled: SchedulerOutput) -> None:
        if scheduled.kv_cache_block_copies:
            copies = [(c.src_block_id, c.dst_block_id) for c in scheduled.kv_cache_block_copies]
            self._kv_caches.copy_blocks(copies)

    def _run(self, step: StepGraph, num_reqs: int, num_tokens: int) -> tuple[Tensor, ...]:
        started = time.perf_counter()
        outputs = step.graph.run()
        seconds = time.perf_counter() - started
        self._metrics.record(step.spec, num_reqs, num_tokens, seconds)
        return outputs

    def _fill(self, inputs: StepInputs, work: StepWork) -> None:
        batch, count = work.batch, work.num_reqs
        tables = [table.get_numpy_array() for table in batch.block_table.block_tables]
        num_computed = batch.num_computed_tokens_cpu[:count]
        if work.phase.takes_chunk:
            own = zip(batch.token_ids_cpu, num_computed, work.counts, strict=False)
            prompts = [tokens[start : start + taken] for tokens, start, taken in own]
            inputs.fill_prefill(prompts, num_computed, [table[:count] for table in tables])
            return
        tokens = batch.token_ids_cpu[_ROWS[:count], num_computed]
        rows = DecodeRows(tokens, num_computed, [table[:count] for table in tables])
        if work.readers:
            rows = rows.with_readers(work.readers)
        if work.phase is Phase.VERIFY:
            _fill_verify(inputs, work, rows)
            return
        inputs.fill_decode(*self._rows.arrange(rows, inputs.spec.bucket))


def _fill_verify(inputs: StepInputs, work: StepWork, rows: DecodeRows) -> None:
    """The drafts of each request follow its latest token; rows stay as scheduled."""
    counts = np.ones(work.num_rows, dtype=np.int64)
    counts[: work.num_reqs] += np.fromiter(map(len, work.drafts), dtype=np.int64)
    tokens = np.zeros((len(counts), inputs.spec.query_len), dtype=np.int64)
    tokens[:, 0] = rows.token_ids
    for row, drafts in zip(tokens, work.drafts, strict=False):
        row[1 : 1 + len(drafts)] = drafts
    inputs.fill_verify(tokens, counts, rows.num_computed, rows.block_rows)
