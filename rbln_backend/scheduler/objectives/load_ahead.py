"""The load of a scheduler before the first token of a request."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

from rbln_backend.scheduler.background import is_background
from rbln_backend.scheduler.constraints import needs_chunk
from rbln_backend.scheduler.objectives.forecast import LoadAhead
from rbln_backend.vllm_compat.surface import Request

if TYPE_CHECKING:
    from rbln_backend.scheduler.scheduler import RblnScheduler


def load_ahead(scheduler: RblnScheduler, request: Request) -> LoadAhead:
    """Return what is computed before ``request``, which waits, has its first token.

    Background requests use spare steps only. The aging of long prompts and the shares of API keys
    are left out: they depend on requests that are still to come.
    """
    own = _left(scheduler, request)
    running = [r for r in scheduler.running if not is_background(r)]
    prompts = []
    for other in chain((r for r in running if needs_chunk(r)), scheduler._waiting()):
        if other is request or is_background(other):
            continue
        left = _left(scheduler, other)
        if _comes_first(other, left, request, own, shortest_first=scheduler._shortest_first):
            prompts.append(left)
        elif other in running and scheduler._chunks is not None:
            # One chunk of it may just be computed.
            prompts.append(min(left, scheduler._chunks.largest))
    return LoadAhead(
        own=own,
        prompts=prompts,
        answers=[r.max_tokens - r.num_output_tokens for r in running if not needs_chunk(r)],
        rows=scheduler.max_num_running_reqs,
        decodes_per_chunk=scheduler._decode_steps_per_chunk,
    )


def _left(scheduler: RblnScheduler, request: Request) -> int:
    """Return the tokens of a prompt that are still to be computed."""
    computed: int = request.num_computed_tokens or scheduler._reuse.manager.peek_hit(request)
    return int(request.num_tokens) - computed


def _comes_first(
    other: Request, left: int, request: Request, own: int, *, shortest_first: bool
) -> bool:
    if other.priority != request.priority:
        return bool(other.priority < request.priority)
    return left <= own or not shortest_first
