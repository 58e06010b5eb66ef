"""Blocks of the KV caches in host memory, where other servers read and fill them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from rbln_backend.compiler.port import KvMemory


class SharedBlocks:
    """The caches themselves, or, for caches in an NPU's memory, buffers of their size.

    Blocks are copied to the buffers when a prompt is computed, and out of them when another
    server's have arrived. vLLM calls ``copy`` for both.
    """

    def __init__(self, memory: KvMemory, caches: Mapping[str, Tensor]) -> None:
        """``caches``: [num_blocks, 2, Hkv, 1, block_size, D] by layer name."""
        self._memory, self._caches = memory, caches
        self.tensors: Mapping[str, Tensor] = {
            name: memory.shared_blocks(cache) for name, cache in caches.items()
        }
        self.are_copies = any(self.tensors[name] is not cache for name, cache in caches.items())

    def copy(
        self,
        sources: Mapping[str, Tensor],  # noqa: ARG002 - vLLM's keys and values, here one block
        targets: Mapping[str, Tensor],  # noqa: ARG002
        source_ids: Sequence[int],
        target_ids: Sequence[int],
        direction: str,
    ) -> None:
        """Copy blocks of every layer, "d2h" or "h2d": vLLM's ``CopyBlocksOp``.

        A block has one number on both sides; ``sources`` and ``targets`` [...] are not read.
        """
        assert source_ids == target_ids
        move = self._memory.read_tokens if direction == "d2h" else self._memory.write_tokens
        for name, cache in self._caches.items():
            for block in source_ids:
                move(cache, block, 0, self.tensors[name][block])
