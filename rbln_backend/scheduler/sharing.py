"""Prompts that one prefill step computes together, where its chunk holds all of them whole.

Each prompt gets the same tokens as alone, bit for bit: rows of a step are independent. A request
must not read KV that another request of the same step writes. So a prompt that shares the next
prefix of another one waits for a later step, in which that prefix is a hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from rbln_backend.bucketing.buckets import ChunkPlan
from rbln_backend.kv_cache.manager import RblnKvCacheManager
from rbln_backend.vllm_compat.surface import Request


class StepBounds(NamedTuple):
    """Limits of vLLM's scheduler for one step."""

    requests: int
    tokens: int
    """Tokens of all requests together."""
    prompt_tokens: int
    """Tokens of one prompt; the rest is left for later steps."""


def adapter_of(request: Request) -> int | None:
    """Return the id of a request's adapter, None without one."""
    return request.lora_request.lora_int_id if request.lora_request else None


def prompts_together(
    plan: ChunkPlan,
    prefilling: Sequence[Request],
    waiting: Iterable[Request],
    bounds: StepBounds,
    cache: RblnKvCacheManager,
) -> dict[str, int]:
    """Return the missing tokens of each prompt of the next prefill step, by request id.

    Empty where the step should take a chunk of one prompt. ``prefilling`` prompts are partly
    computed, ``waiting`` requests can begin; both are in order of admission. Prompts are taken
    whole: none that ``bounds`` would cut is included.
    """
    chosen = _Chosen(cache.block_pool.hash_block_size)
    most = min(bounds.requests, plan.prompts)
    for request in takewhile(chosen.has_adapter, prefilling[:most]):
        chosen.add(request, request.num_computed_tokens)
    for request in waiting:
        if len(chosen.requests) >= most or sum(chosen.left) >= plan.largest:
            break
        if not chosen.suits(request):
            break
        hit = request.num_computed_tokens or cache.peek_hit(request)
        chosen.add(request, hit)
    whole = list(takewhile(lambda tokens: tokens <= bounds.prompt_tokens, chosen.left))
    count = plan.together(whole) if whole else 1
    while sum(whole[:count]) > bounds.tokens and count > 1:
        count -= 1
    if count == 1:
        return {}
    ids = [request.request_id for request in chosen.requests[:count]]
    return dict(zip(ids, chosen.left, strict=False))


@dataclass(slots=True)
class _Chosen:
    unit: int
    """Tokens between two positions where a prefix can be hit."""
    requests: list[Request] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)

    def add(self, request: Request, start: int) -> None:
        self.requests.append(request)
        self.left.append(request.num_tokens - start)
        self._starts.append(start)

    def has_adapter(self, request: Request) -> bool:
        """Return whether ``request`` has the adapter of the chosen ones."""
        return not self.requests or adapter_of(request) == adapter_of(self.requests[0])

    def suits(self, request: Request) -> bool:
        """Return whether it has that adapter and shares no chosen request's next prefix."""
        others = zip(self.requests, self._starts, strict=True)
        return self.has_adapter(request) and not any(
            _adds_prefix_of(request, other, start, self.unit) for other, start in others
        )


def will_compute_prefix_of(request: Request, others: Iterable[Request], unit: int) -> bool:
    """Return whether one of ``others`` will compute a prefix that ``request`` could hit.

    ``unit``: tokens between two positions where a prefix can be hit.
    """
    return any(_adds_prefix_of(request, r, r.num_computed_tokens, unit) for r in others)


def _adds_prefix_of(request: Request, other: Request, start: int, unit: int) -> bool:
    """Return whether the next prefix of ``other`` after ``start`` tokens is one of ``request``."""
    # A prefix hash covers all tokens before it.
    place, hashes, theirs = start // unit, request.block_hashes, other.block_hashes
    return place < min(len(hashes), len(theirs)) and hashes[place] == theirs[place]
