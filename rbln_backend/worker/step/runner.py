"""One engine step up to the graph's outputs, for every kind of model."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rbln_backend.core import Phase, StepBatch, StepOutputs, StepResult, StepRound, UsefulRows
from rbln_backend.kv_cache.tensors import KvCaches
from rbln_backend.scheduler.output import head_copies, moves_kv, page_moves, window_transfers
from rbln_backend.vllm_compat.surface import SchedulerOutput
from rbln_backend.worker.step.adapter_rows import AdapterRows
from rbln_backend.worker.step.agreement import StepAgreement
from rbln_backend.worker.step.batches import RequestBatches
from rbln_backend.worker.step.graph_set import GraphSet, StepGraph
from rbln_backend.worker.step.inputs import DecodeRows, RowOrder, StepInputs
from rbln_backend.worker.step.metrics import StepMetrics
from rbln_backend.worker.step.plain_rows import PlainRows
from rbln_backend.worker.step.stage import SoleStage, Stage

# Row numbers of any decode batch; sliced, so that no step allocates an array.
_ROWS = np.arange(1 << 16)


class StepRunner:
    """Runs the static-shape graph of a scheduler output."""

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
