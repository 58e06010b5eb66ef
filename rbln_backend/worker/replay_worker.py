"""The worker and scheduler of a replay, which runs with several sets of buckets in turn."""

from __future__ import annotations

from collections.abc import Mapping

from rbln_backend.bucketing.chunk_plan import ChunkPlan, room_of
from rbln_backend.bucketing.table import BucketTable
from rbln_backend.core import Phase
from rbln_backend.scheduler.scheduler import RblnScheduler
from rbln_backend.vllm_compat.surface import SchedulerOutput, configured
from rbln_backend.worker.worker import RblnWorker


class ReplayWorker(RblnWorker):
    """An ``RblnWorker`` with ``use_buckets`` for ``collective_rpc``."""

    def use_buckets(self, tables: Mapping[str, BucketTable]) -> None:
        """Use only these compiled buckets, by phase; the largest must be the same."""
        assert self._build is not None
        self._build.restrict({Phase(name): table for name, table in tables.items()})


class ReplayScheduler(RblnScheduler):
    """An ``RblnScheduler`` that records the phase and size of the latest step."""

    _step: tuple[str, int] | None = None

    def use_chunks(self, table: BucketTable) -> None:
        """Split prompts into chunks of these sizes from now on."""
        rbln = configured(self.vllm_config)
        assert rbln.prefill_step_tokens is not None
        self._chunks = ChunkPlan(table, rbln.prefill_step_tokens, rbln.chunk_prompts)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        prefilling = {request.request_id for request in self._prefilling()}
        known = {request.request_id for request in self.running}
        output = super().schedule(throttle_prefills)
        tokens = output.num_scheduled_tokens
        if tokens:
            # A request that is new in this step has a chunk as well if it has several tokens.
            is_chunk = bool(prefilling & tokens.keys()) or any(
                count > 1 for name, count in tokens.items() if name not in known
            )
            chunk = room_of(output.total_num_scheduled_tokens, len(tokens))
            size = chunk if is_chunk else len(tokens)
            self._step = ("prefill" if is_chunk else "decode", size)
        return output

    def take_step(self) -> tuple[str, int] | None:
        """Return phase and size of the step since the last call: tokens of a chunk, or rows."""
        step, self._step = self._step, None
        return step
