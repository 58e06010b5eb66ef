"""The requests and limits that one call of vLLM's ``Scheduler.schedule`` sees."""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass

from rbln_backend.scheduler.background import background_last
from rbln_backend.scheduler.constraints import is_prefill
from rbln_backend.vllm_compat.surface import Request, Scheduler


@dataclass(slots=True, kw_only=True)
class StepView:
    """The part of a scheduler that one step sees."""

    running: list[Request]
    hidden: Sequence[Request]
    """Running requests that take no part in the step."""
    max_running: int
    max_tokens: int | None = None
    """Token budget of the step; None, or more than vLLM's own budget: vLLM's."""
    cuts_prompts: bool = True
    adds_drafts: bool = True
    """False disables drafts for this step."""
    decode_prefill: bool = False
    """True computes one token of each prompt, in a decode row."""
    left_out: Set[str] = frozenset()
    """Names of running requests that the step does not compute, and may preempt."""


class NarrowedScheduler(Scheduler):
    """vLLM's scheduler with single calls narrowed to a ``StepView``; nothing outlasts a call."""

    _decode_prefill = False
    _left_out: Set[str] = frozenset()

    @contextmanager
    def _narrowed(self, view: StepView) -> Iterator[None]:
        """Restrict the scheduler to ``view``; on exit hidden requests are running again."""
        before, capacity = self.running, self.max_num_running_reqs
        budget, drafts = self.max_num_scheduled_tokens, self.num_spec_tokens
        self.running, self.max_num_running_reqs = view.running, view.max_running
        if view.max_tokens is not None:
            self.max_num_scheduled_tokens = min(view.max_tokens, budget)
        if not view.adds_drafts:
            self.num_spec_tokens = 0
        if not view.cuts_prompts:
            self.scheduler_config.enable_chunked_prefill = False
        self._decode_prefill, self._left_out = view.decode_prefill, view.left_out
        try:
            yield
        finally:
            self._decode_prefill, self._left_out = False, frozenset()
            if not view.cuts_prompts:
                self.scheduler_config.enable_chunked_prefill = True
            self.num_spec_tokens, self.max_num_scheduled_tokens = drafts, budget
            self.max_num_running_reqs = capacity
            if view.running is not before:
                # The newest request stays last: upstream preempts from the end.
                self.running = background_last([*view.hidden, *self.running], before)

    def _reserve_prefill_lookahead(
        self, request: Request, num_computed_tokens: int, num_new_tokens: int
    ) -> int:
        """Return the tokens of a request that a step computes: 1 of a prompt in a decode row."""
        if request.request_id in self._left_out:
            return 0
        if self._decode_prefill and is_prefill(num_computed_tokens, request.num_tokens):
            return 1
        tokens: int = super()._reserve_prefill_lookahead(
            request, num_computed_tokens, num_new_tokens
        )
        return tokens

    @contextmanager
    def _held_back(self, requests: Sequence[Request]) -> Iterator[None]:
        """Hide waiting ``requests``; on exit they are back in front, as skipped requests are."""
        if requests:
            self.skipped_waiting.remove_requests(requests)
            self.waiting.remove_requests(requests)
        try:
            yield
        finally:
            for request in reversed(requests):
                self.skipped_waiting.prepend_request(request)
