"""Prompts that one prefill step computes together, where its chunk holds all of them whole.

Each has the tokens that it has by itself, bit for bit: rows of a step do not see each other. What
a step writes into the KV cache no other request of the same step may read, so that a prompt that
begins as another one does waits until that is there to be hit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from rbln_backend.bucketing.chunk_plan import ChunkPlan
from rbln_backend.vllm_compat.surface import KVCacheManager, Request


def adapter_of(request: Request) -> int | None:
    """The number of a request's adapter."""
    return request.lora_request.lora_int_id if request.lora_request else None


def prompts_together(
    plan: ChunkPlan,
    prefilling: Sequence[Request],
    waiting: Iterable[Request],
    room: int,
    cache: KVCacheManager,
) -> dict[str, int]:
    """What the next prefill step lacks of each prompt that it should compute, by request.

    Empty where it should take a chunk of one prompt. ``prefilling``: the one that is under way, if
    any; ``waiting``: those that can begin, in the order in which they will; at most ``room`` of
    both.
    """
    chosen = _Chosen(cache.block_pool.hash_block_size)
    for request in prefilling:
        chosen.add(request, request.num_computed_tokens)
    most = min(room, plan.prompts)
    for request in waiting:
        if len(chosen.requests) >= most or sum(chosen.left) >= plan.largest:
            break
        if not chosen.suits(request):
            break
        hit = request.num_computed_tokens or cache.get_computed_blocks(request)[1]
        chosen.add(request, hit)
    count = plan.together(chosen.left) if chosen.left else 1
    if count == 1:
        return {}
    ids = [request.request_id for request in chosen.requests[:count]]
    return dict(zip(ids, chosen.left, strict=False))


@dataclass(slots=True)
class _Chosen:
    unit: int
    """Tokens between two places where a prefix can be hit."""
    requests: list[Request] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    _starts: list[int] = field(default_factory=list)

    def add(self, request: Request, start: int) -> None:
        self.requests.append(request)
        self.left.append(request.num_tokens - start)
        self._starts.append(start)

    def suits(self, request: Request) -> bool:
        """Whether it has the adapter of the others, and begins as none of them goes on."""
        if self.requests and adapter_of(request) != adapter_of(self.requests[0]):
            return False
        hashes = request.block_hashes
        for other, start in zip(self.requests, self._starts, strict=True):
            # The first prefix that the other one will add; its hash is of all before it, too.
            place = start // self.unit
            theirs = other.block_hashes
            if place < min(len(hashes), len(theirs)) and hashes[place] == theirs[place]:
                return False
        return True
