"""Number of drafts of each request that a decode step can check."""

from __future__ import annotations

from collections.abc import Sequence

from rbln_backend.bucketing.verify import NO_DRAFTS, VerifyTable
from rbln_backend.vllm_compat.surface import BlockPool, Request


class DraftCapacity:
    """Limits drafts to compiled sizes and to free KV blocks, so that none causes a preemption."""

    def __init__(self, table: VerifyTable, block_size: int, groups: int) -> None:
        """``groups``: number of KV cache groups; each holds every token."""
        self._table, self._block_size, self._groups = table, block_size, groups

    def cut(self, decoding: Sequence[Request], blocks: BlockPool) -> None:
        """Drop the drafts that no compiled step checks; drop all where free blocks are too few."""
        if self._table is NO_DRAFTS or not decoding:
            return
        longest = self._table.longest(len(decoding))
        # Blocks that the tokens of one request can need.
        each = (1 + longest // self._block_size) * self._groups
        if blocks.get_num_free_blocks() < len(decoding) * each:
            longest = 1
        for request in decoding:
            del request.spec_token_ids[longest - 1 :]
