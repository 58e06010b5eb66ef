"""What one call of vLLM's ``Scheduler.schedule`` sees and may take; nothing outlasts the call."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from rbln_backend.scheduler.background import background_last
from rbln_backend.vllm_compat.surface import Request, Scheduler


@contextmanager
def at_most(scheduler: Scheduler, tokens: int | None) -> Iterator[None]:
    """Give the step ``tokens`` tokens; None: as many as any."""
    whole_budget = scheduler.max_num_scheduled_tokens
    if tokens is not None:
        scheduler.max_num_scheduled_tokens = tokens
    try:
        yield
    finally:
        scheduler.max_num_scheduled_tokens = whole_budget


@contextmanager
def whole_prompts(scheduler: Scheduler, tokens: int) -> Iterator[None]:
    """Give the step ``tokens`` tokens, and let upstream cut no prompt."""
    scheduler.scheduler_config.enable_chunked_prefill = False
    try:
        with at_most(scheduler, tokens):
            yield
    finally:
        scheduler.scheduler_config.enable_chunked_prefill = True


@contextmanager
def without_drafts(scheduler: Scheduler) -> Iterator[None]:
    """Let upstream not fill the only token of a request that comes in up with drafts."""
    drafts, scheduler.num_spec_tokens = scheduler.num_spec_tokens, 0
    try:
        yield
    finally:
        scheduler.num_spec_tokens = drafts


@contextmanager
def held_back(scheduler: Scheduler, requests: Sequence[Request]) -> Iterator[None]:
    """Let upstream not see waiting ``requests``; they keep their places, as skipped ones do."""
    if requests:
        scheduler.skipped_waiting.remove_requests(requests)
        scheduler.waiting.remove_requests(requests)
    try:
        yield
    finally:
        for request in reversed(requests):
            scheduler.skipped_waiting.prepend_request(request)


@contextmanager
def narrowed(
    scheduler: Scheduler, visible: list[Request], hidden: Sequence[Request], *, max_running: int
) -> Iterator[None]:
    """Let upstream see only ``visible``; hidden requests come back whatever happens."""
    full_capacity, before = scheduler.max_num_running_reqs, scheduler.running
    scheduler.running, scheduler.max_num_running_reqs = visible, max_running
    try:
        yield
    finally:
        scheduler.max_num_running_reqs = full_capacity
        if visible is not before:
            # The newest request stays last: upstream preempts from the end.
            scheduler.running = background_last([*hidden, *scheduler.running], before)
