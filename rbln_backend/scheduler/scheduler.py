"""vLLM's scheduler, narrowed to what a static-shape device can run in one step."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rbln_backend.scheduler.constraints import is_prefill, prefill_block_reason
from rbln_backend.vllm_compat.surface import Request, Scheduler, SchedulerOutput


class RblnScheduler(Scheduler):
    """Each step is one prefill chunk of one request or one decode batch, never both.

    Rules (``constraints.py``), in order:

    * a request in the middle of its prefill goes on before another is admitted;
    * prefill and decode steps alternate while both have work, so that neither starves;
    * a prefill step sees no decoding request, and admits at most one waiting request with the
      whole token budget;
    * a decode step admits nobody.

    Admission, KV blocks, preemption, prefix hits and aborts are upstream's, unchanged: each rule
    only hides requests from, or caps, one call of ``Scheduler.schedule``.
    """

    _last_step_was_prefill = False

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        if self._prefill_block_reason() is None:
            output = self._schedule_prefill(throttle_prefills)
            self._last_step_was_prefill = output.total_num_scheduled_tokens > 0
            if self._last_step_was_prefill or not self.running:
                return output
            # Nothing could be admitted (no KV blocks, or grammars still compiling): the step
            # belongs to the decodes, and what the first attempt reported must not be lost.
            return _merge_reports(output, self._schedule_decode(throttle_prefills))
        self._last_step_was_prefill = False
        return self._schedule_decode(throttle_prefills)

    def _prefilling(self) -> list[Request]:
        return [r for r in self.running if is_prefill(r.num_computed_tokens, r.num_tokens)]

    def _prefill_block_reason(self) -> str | None:
        num_prefilling = len(self._prefilling())
        return prefill_block_reason(
            num_prefilling=num_prefilling,
            num_waiting=len(self.waiting) + len(self.skipped_waiting),
            num_running=len(self.running),
            max_num_seqs=self.max_num_running_reqs,
            decodes_owed=self._last_step_was_prefill and len(self.running) > num_prefilling,
        )

    def _schedule_prefill(self, throttle_prefills: bool) -> SchedulerOutput:
        prefilling = self._prefilling()[:1]
        hidden = [request for request in self.running if request not in prefilling]
        with self._narrowed(prefilling, hidden, max_running=1):
            return super().schedule(throttle_prefills)

    def _schedule_decode(self, throttle_prefills: bool) -> SchedulerOutput:
        prefilling = self._prefilling()
        decoding = [request for request in self.running if request not in prefilling]
        with self._narrowed(decoding, prefilling, max_running=len(decoding)):
            return super().schedule(throttle_prefills)

    @contextmanager
    def _narrowed(
        self, visible: list[Request], hidden: list[Request], *, max_running: int
    ) -> Iterator[None]:
        """Let upstream see only ``visible``; hidden requests come back whatever happens."""
        full_capacity = self.max_num_running_reqs
        before_prefill = hidden and not is_prefill(
            hidden[0].num_computed_tokens, hidden[0].num_tokens
        )
        self.running, self.max_num_running_reqs = visible, max_running
        try:
            yield
        finally:
            self.max_num_running_reqs = full_capacity
            # The newest request stays last: upstream preempts from the end.
            self.running = hidden + self.running if before_prefill else self.running + hidden


def _merge_reports(first: SchedulerOutput, second: SchedulerOutput) -> SchedulerOutput:
    """Carry what an empty first attempt told the workers into the step that runs."""
    second.finished_req_ids = first.finished_req_ids | second.finished_req_ids
    second.free_encoder_mm_hashes = first.free_encoder_mm_hashes + second.free_encoder_mm_hashes
    if first.preempted_req_ids:
        second.preempted_req_ids = first.preempted_req_ids | (second.preempted_req_ids or set())
    if first.kv_cache_block_copies:
        later = second.kv_cache_block_copies or []
        second.kv_cache_block_copies = first.kv_cache_block_copies + later
    return second
