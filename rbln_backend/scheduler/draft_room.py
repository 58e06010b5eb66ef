"""How many drafts of each request a decode step has room for."""

from __future__ import annotations

from collections.abc import Sequence

from rbln_backend.bucketing.verify import NO_DRAFTS, VerifyTable
from rbln_backend.vllm_compat.surface import BlockPool, Request


class DraftRoom:
    """Over the compiled sizes; a draft must not take a block for which another is preempted."""

    def __init__(self, table: VerifyTable, block_size: int, groups: int) -> None:
        """``groups``: of the KV cache, in each of which a token has a place."""
        self._table, self._block_size, self._groups = table, block_size, groups

    def cut(self, decoding: Sequence[Request], blocks: BlockPool) -> None:
        """Keep of each request's drafts what a compiled step takes, none where blocks are few."""
        if self._table is NO_DRAFTS or not decoding:
            return
        longest = self._table.longest(len(decoding))
        # What a request's tokens may need.
        each = (1 + longest // self._block_size) * self._groups
        if blocks.get_num_free_blocks() < len(decoding) * each:
            longest = 1
        for request in decoding:
            del request.spec_token_ids[longest - 1 :]
