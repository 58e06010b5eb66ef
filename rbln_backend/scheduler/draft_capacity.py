"""Number of drafts of each request that a decode step can check."""

from __future__ import annotations

from collections.abc import Mapping

from rbln_backend.bucketing.buckets import NO_DRAFTS, VerifyTable
from rbln_backend.scheduler.background import Rows
from rbln_backend.scheduler.output import DraftedOutput
from rbln_backend.vllm_compat.surface import (
    BlockPool,
    DraftTokenIds,
    ModelRunnerOutput,
    Request,
    RequestStatus,
)


def rows_of_other_steps(rows: Rows, most: int) -> tuple[set[str], bool]:
    """Return the names of requests that a step of ``most`` rows leaves to other steps.

    A pipeline's other stages may still compute a request's latest token, and drafts behind it.
    Also return True if the step is full without them.
    """
    ready = [r.request_id for r in rows.visible if r.num_computed_tokens < r.num_tokens]
    left_out = {request.request_id for request in rows.visible}.difference(ready[:most])
    return left_out, len(ready) >= most


def drafts_to_check(
    output: ModelRunnerOutput, requests: Mapping[str, Request]
) -> DraftTokenIds | None:
    """Return the drafts that came with a step's result, of requests that it leaves decoding."""
    if not isinstance(output, DraftedOutput) or output.drafts is None:
        return None
    pairs = zip(output.drafts.req_ids, output.drafts.draft_token_ids, strict=True)
    decoding = {name: own for name, own in pairs if _is_ready(requests.get(name))}
    return DraftTokenIds(list(decoding), list(decoding.values()))


def _is_ready(request: Request | None) -> bool:
    """Return False for a request that has ended or lost its blocks since the step began."""
    if request is None or request.status != RequestStatus.RUNNING:
        return False
    return request.num_computed_tokens + 1 == request.num_tokens


class DraftCapacity:
    """Limits drafts to compiled sizes within the context and to free KV blocks.

    A step takes as many tokens of each request, padding included: none may lie beyond
    ``max_model_len``, where an NPU's op has no place for them. Drafts never cause a preemption.
    """

    def __init__(
        self, table: VerifyTable, block_size: int, groups: int, max_model_len: int
    ) -> None:
        """``groups``: number of KV cache groups; each holds every token."""
        self._table, self._block_size, self._groups = table, block_size, groups
        self._max_model_len = max_model_len

    def cut(self, rows: Rows, blocks: BlockPool) -> None:
        """Drop the drafts that no compiled step checks; drop all where free blocks are too few."""
        decoding = rows.decoding
        if self._table is NO_DRAFTS or not decoding:
            return
        room = self._max_model_len - max(r.num_computed_tokens for r in rows.visible)
        longest = self._table.longest(len(decoding), room)
        # Blocks that the tokens of one request can need.
        each = (1 + longest // self._block_size) * self._groups
        if blocks.get_num_free_blocks() < len(decoding) * each:
            longest = 1
        for request in decoding:
            del request.spec_token_ids[longest - 1 :]
