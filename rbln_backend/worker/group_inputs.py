"""The part of a graph's input buffers that belongs to one KV cache group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from struct import pack_into
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rbln_backend.core import GraphSpec
from rbln_backend.kv_cache.layout import num_partitions
from rbln_backend.kv_cache.specs import WindowSpec, any_layer_spec, layer_specs, window_in
from rbln_backend.layers.attention import (
    PagedMetadata,
    RblnAttentionMetadata,
    WindowMetadata,
)
from rbln_backend.vllm_compat.surface import KVCacheConfig

IntArray = npt.NDArray[np.int64] | npt.NDArray[np.int32]


class GroupInputs(Protocol):
    """Fills the inputs of one group's attention layers. Padding: the null block 0, no tokens."""

    tensors: dict[str, Tensor]
    metadata: RblnAttentionMetadata

    def fill(self, starts: IntArray, counts: IntArray | int, block_rows: IntArray) -> None:
        """Fill ``counts`` tokens of each of n requests from ``starts`` [n] on.

        ``block_rows`` [n, ...] are their blocks.
        """
        ...

    def advance(self, positions: Sequence[int]) -> None:
        """Fill the next token, at ``positions`` [n], of each request of the latest decode step."""
        ...

    def put_blocks(self, row: int, blocks: IntArray) -> None:
        """Replace the blocks [...] of one row."""
        ...


@dataclass(frozen=True)
class KvGroup:
    """The shape of a KV cache group, as the step loop uses it."""

    layer_names: tuple[str, ...]
    block_size: int
    """Positions of a block."""
    width: int
    """P: blocks per request, the width of the block table."""
    is_window: bool
    """Each request has one block, which is its window, shifted in place."""
    one_block: bool
    """See ``PagedMetadata``, as for ``appended_window``."""
    appended_window: int | None = None

    def allocate(
        self, spec: GraphSpec, suffix: str, query_counts: Tensor | None = None
    ) -> GroupInputs:
        """Allocate the buffers of one graph; ``suffix`` separates the names of several groups.

        ``query_counts`` [prompts] int32: see ``RblnAttentionMetadata``.
        """
        maker = WindowInputs if self.is_window else PagedInputs
        return maker(self, spec, suffix, query_counts)


def kv_groups(
    config: KVCacheConfig,
    max_model_len: int,
    sharing: Mapping[str, str],
) -> list[KvGroup]:
    """Return the groups of an engine, in vLLM's order; ``sharing`` layers belong to the owner's."""
    groups = []
    for group in config.kv_cache_groups:
        specs = layer_specs(group.kv_cache_spec, group.layer_names)
        # A pipeline stage may have no layer of a group, but receives the blocks of all groups.
        spec = next(iter(specs.values()), None) or any_layer_spec(group.kv_cache_spec)
        is_window = isinstance(spec, WindowSpec)
        block_size = spec.window if isinstance(spec, WindowSpec) else spec.block_size
        groups.append(
            KvGroup(
                layer_names=(*specs, *(n for n, owner in sharing.items() if owner in specs)),
                block_size=block_size,
                width=1 if is_window else num_partitions(max_model_len, block_size),
                is_window=is_window,
                one_block=block_size == max_model_len,
                appended_window=None if is_window else window_in(spec),
            )
        )
    return groups


class PagedInputs:
    """``seq_idx`` [B, 1] and ``block_tables`` [P] or [B, P]; see ``PagedMetadata``."""

    def __init__(
        self, group: KvGroup, spec: GraphSpec, suffix: str, query_counts: Tensor | None
    ) -> None:
        rows, width = spec.requests, group.width
        is_prefill = spec.phase.takes_chunk
        seq_idx = torch.zeros(rows, 1, dtype=torch.int64)
        is_one = is_prefill and query_counts is None
        tables = torch.zeros((width,) if is_one else (rows, width), dtype=torch.int32)
        self.tensors = {f"seq_idx{suffix}": seq_idx, f"block_tables{suffix}": tables}
        self.metadata: RblnAttentionMetadata = PagedMetadata(
            batch_size=spec.batch_size,
            query_len=spec.query_len,
            is_prefill=is_prefill,
            query_counts=query_counts,
            seq_idx=seq_idx,
            block_tables=tables,
            one_block=group.one_block,
            window=group.appended_window,
        )
        self.seq_idx: IntArray = seq_idx.numpy()
        self.block_tables: IntArray = tables.view(rows, width).numpy()

    def fill(
        self,
        starts: IntArray,
        counts: IntArray | int,  # noqa: ARG002
        block_rows: IntArray,
    ) -> None:
        count, width = len(starts), self.block_tables.shape[1]
        self.seq_idx[:count, 0] = starts
        self.block_tables[:count] = block_rows[:, :width]
        if count < len(self.seq_idx):
            self.seq_idx[count:] = 0
            self.block_tables[count:] = 0

    def advance(self, positions: Sequence[int]) -> None:
        pack_into(f"{len(positions)}q", self.seq_idx.data, 0, *positions)

    def put_blocks(self, row: int, blocks: IntArray) -> None:
        self.block_tables[row] = blocks[: self.block_tables.shape[1]]


class WindowInputs:
    """``cache_seq_len``, ``cache_offset`` [B, 1] and the block ids; see ``WindowMetadata``."""

    def __init__(
        self, group: KvGroup, spec: GraphSpec, suffix: str, query_counts: Tensor | None
    ) -> None:
        rows = spec.requests
        is_prefill = spec.phase.takes_chunk
        cache_seq_len = torch.zeros(rows, 1, dtype=torch.int32)
        cache_offset = torch.zeros(rows, 1, dtype=torch.int32)
        tables = torch.zeros((rows,) if is_prefill else (rows, 1), dtype=torch.int32)
        self.tensors = {
            f"cache_seq_len{suffix}": cache_seq_len,
            f"cache_offset{suffix}": cache_offset,
            f"local_block_tables{suffix}": tables,
        }
        self.metadata: RblnAttentionMetadata = WindowMetadata(
            batch_size=spec.batch_size,
            query_len=spec.query_len,
            is_prefill=is_prefill,
            query_counts=query_counts,
            cache_seq_len=cache_seq_len,
            cache_offset=cache_offset,
            block_tables=tables,
        )
        self.cache_seq_len: IntArray = cache_seq_len.numpy()
        self.cache_offset: IntArray = cache_offset.numpy()
        self.block_tables: IntArray = tables.view(rows, 1).numpy()
        self._window = group.block_size

    def fill(self, starts: IntArray, counts: IntArray | int, block_rows: IntArray) -> None:
        count = len(starts)
        lengths = self.cache_seq_len[:count, 0]
        np.minimum(starts, self._window, out=lengths, casting="unsafe")
        self.cache_offset[:count, 0] = lengths + counts
        self.block_tables[:count] = block_rows[:, :1]
        if count < len(self.cache_seq_len):
            for padded in (self.cache_seq_len, self.cache_offset, self.block_tables):
                padded[count:] = 0

    def advance(self, positions: Sequence[int]) -> None:
        lengths = [min(position, self._window) for position in positions]
        pack_into(f"{len(positions)}i", self.cache_seq_len.data, 0, *lengths)
        pack_into(
            f"{len(positions)}i", self.cache_offset.data, 0, *[length + 1 for length in lengths]
        )

    def put_blocks(self, row: int, blocks: IntArray) -> None:
        self.block_tables[row] = blocks[:1]


def by_layer(
    groups: Sequence[KvGroup], inputs: Sequence[GroupInputs]
) -> dict[str, RblnAttentionMetadata]:
    """Return the metadata of every attention layer by its name."""
    return {
        name: part.metadata
        for group, part in zip(groups, inputs, strict=True)
        for name in group.layer_names
    }
