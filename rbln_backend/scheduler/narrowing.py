"""What one call of vLLM's ``Scheduler.schedule`` sees and may take; nothing outlasts the call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rbln_backend.scheduler.background import background_last
from rbln_backend.vllm_compat.surface import Request, Scheduler


class NarrowedScheduler(Scheduler):
    """vLLM's scheduler, for whoever narrows single calls of it."""

    @contextmanager
    def _at_most(self, tokens: int | None) -> Iterator[None]:
        """Give the step ``tokens`` tokens, None or more than the budget: as many as any."""
        whole_budget = self.max_num_scheduled_tokens
        if tokens is not None:
            self.max_num_scheduled_tokens = min(tokens, whole_budget)
        try:
            yield
        finally:
            self.max_num_scheduled_tokens = whole_budget

    @contextmanager
    def _whole_prompts(self, tokens: int) -> Iterator[None]:
        """Give the step ``tokens`` tokens, and let upstream cut no prompt."""
        self.scheduler_config.enable_chunked_prefill = False
        try:
            with self._at_most(tokens):
                yield
        finally:
            self.scheduler_config.enable_chunked_prefill = True

    @contextmanager
    def _without_drafts(self) -> Iterator[None]:
        """Let upstream not fill the only token of a request that comes in up with drafts."""
        drafts, self.num_spec_tokens = self.num_spec_tokens, 0
        try:
            yield
        finally:
            self.num_spec_tokens = drafts

    @contextmanager
    def _held_back(self, requests: Sequence[Request]) -> Iterator[None]:
        """Let upstream not see waiting ``requests``; they keep their places, as skipped ones do."""
        if requests:
            self.skipped_waiting.remove_requests(requests)
            self.waiting.remove_requests(requests)
        try:
            yield
        finally:
            for request in reversed(requests):
                self.skipped_waiting.prepend_request(request)

    @contextmanager
    def _narrowed(
        self, visible: list[Request], hidden: Sequence[Request], *, max_running: int
    ) -> Iterator[None]:
        """Let upstream see only ``visible``; hidden requests come back whatever happens."""
        full_capacity, before = self.max_num_running_reqs, self.running
        self.running, self.max_num_running_reqs = visible, max_running
        try:
            yield
        finally:
            self.max_num_running_reqs = full_capacity
            if visible is not before:
                # The newest request stays last: upstream preempts from the end.
                self.running = background_last([*hidden, *self.running], before)
