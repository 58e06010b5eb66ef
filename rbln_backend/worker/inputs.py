"""The input buffers of one graph: allocated once, filled in place at every step.

Each KV cache group has a part of them, and a step's rows their order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from struct import pack_into
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rbln_backend.core import GraphSpec, StepBatch
from rbln_backend.kv_cache.layout import num_partitions
from rbln_backend.kv_cache.specs import WindowSpec, any_layer_spec, layer_specs, window_in
from rbln_backend.layers.attention import (
    EncoderMetadata,
    PagedMetadata,
    RblnAttentionMetadata,
    WindowMetadata,
)
from rbln_backend.layers.moe import TOKENS_MASK
from rbln_backend.lora.slots import INPUT_NAME, RowInput

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters

IntArray = npt.NDArray[np.int64] | npt.NDArray[np.int32]


class GroupInputs(Protocol):
    """Fills the inputs of one group's attention layers. Padding: the null block 0, no tokens."""

    tensors: dict[str, Tensor]
    metadata: RblnAttentionMetadata

    def fill(self, starts: IntArray, counts: IntArray | int, block_rows: IntArray) -> None:
        """Fill ``counts`` tokens of each of n requests from ``starts`` [n] on.

        ``block_rows`` [n, ...] are their blocks.
        """

    def advance(self, positions: Sequence[int]) -> None:
        """Fill the next token, at ``positions`` [n], of each request of the latest decode step."""

    def put_blocks(self, row: int, blocks: IntArray) -> None:
        """Replace the blocks [...] of one row."""


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
    config: KVCacheConfig, max_model_len: int, sharing: Mapping[str, str]
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
    return {
        name: part.metadata
        for group, part in zip(groups, inputs, strict=True)
        for name in group.layer_names
    }


T = TypeVar("T")
Rows = TypeVar("Rows", Tensor, IntArray)


@dataclass
class StepInputs:
    """Input buffers of a graph with batch size B and query length L.

    The numpy arrays are views of the tensors, so filling them fills the graph's inputs. Padding:
    token id 0, position 0, and see ``GroupInputs``.
    """

    spec: GraphSpec
    token_ids: IntArray
    """[B, L] int64."""
    positions: IntArray
    """[B, L] int64."""
    token_indices: IntArray
    """[R] int64: the last row of each of R requests of a chunk; [1] in decode, unused."""
    query_counts: IntArray
    """[R] int32: the rows of each; empty if a chunk holds one request."""
    row_input: RowInput | None
    """The form of the input with the slot of each request's adapter, or of a chunk's."""
    tokens_mask: npt.NDArray[np.float32]
    """[ranks, B * L]: 0 in padding; [0, B * L] in an engine whose graphs do not read it."""
    groups: Sequence[GroupInputs]
    """One per KV cache group, in vLLM's order."""
    tensors: dict[str, Tensor]
    metadata: dict[str, RblnAttentionMetadata]
    """By attention layer."""
    places: list[int] = field(default_factory=list)
    """[n]: the positions of the decode step that was filled last."""

    @classmethod
    def allocate(
        cls,
        spec: GraphSpec,
        groups: Sequence[KvGroup],
        encoder_layers: Sequence[str] = (),
        *,
        row_input: RowInput | None = None,
        masked_ranks: int = 0,
        intermediates: Callable[[int], Mapping[str, Tensor]] | None = None,
    ) -> StepInputs:
        """Allocate the buffers of ``spec``; shapes and dtypes are those of the attributes.

        ``encoder_layers`` have no KV cache. ``row_input``: of adapters. ``masked_ranks``:
        data-parallel ranks in ``tokens_mask``. ``intermediates``: makes buffers [rows, H] of the
        previous stage's outputs.
        """
        batch, length = spec.batch_size, spec.query_len
        tensors = {
            "input_ids": torch.zeros(batch, length, dtype=torch.int64),
            "positions": torch.zeros(batch, length, dtype=torch.int64),
            "token_indices": torch.zeros(spec.prompts, dtype=torch.int64),
        }
        counts = torch.zeros(spec.prompts if spec.prompts > 1 else 0, dtype=torch.int32)
        if len(counts):
            tensors["query_counts"] = counts
        if intermediates is not None:
            tensors |= intermediates(batch * length)
        if row_input is not None:
            tensors[INPUT_NAME] = row_input.allocate(batch)
        mask = torch.zeros(masked_ranks * batch * length, 1)
        if masked_ranks:
            tensors[TOKENS_MASK] = mask
        shared = tensors.get("query_counts")
        parts = [group.allocate(spec, f".{index}", shared) for index, group in enumerate(groups)]
        for part in parts:
            tensors |= part.tensors
        encoder = EncoderMetadata(
            batch_size=batch,
            query_len=length,
            is_prefill=spec.phase.takes_chunk,
            last_row=tensors["token_indices"],
        )
        return cls(
            spec=spec,
            token_ids=tensors["input_ids"].numpy(),
            positions=tensors["positions"].numpy(),
            token_indices=tensors["token_indices"].numpy(),
            query_counts=counts.numpy(),
            row_input=row_input,
            tokens_mask=mask.view(masked_ranks, batch * length).numpy(),
            groups=parts,
            tensors=tensors,
            metadata=by_layer(groups, parts) | dict.fromkeys(encoder_layers, encoder),
        )

    def fill_prefill(
        self, prompts: Sequence[IntArray], starts: IntArray, block_rows: Sequence[IntArray]
    ) -> None:
        """Fill one chunk with the tokens of n <= R requests, at most L in all.

        Each prompt [tokens] starts at its position in ``starts`` [n]; ``block_rows`` [n, ...] are
        by group.
        """
        counts = np.fromiter(map(len, prompts), dtype=np.int64)
        ends, end = counts.cumsum(), int(counts.sum())
        self.token_ids[0, :end] = np.concatenate(prompts)
        self.token_ids[0, end:] = 0
        self.positions[0, :end] = np.arange(end) + np.repeat(starts - (ends - counts), counts)
        self.positions[0, end:] = 0
        for whole, values in ((self.token_indices, ends - 1), (self.query_counts, counts)):
            if len(whole):
                whole[: len(values)] = values
                whole[len(values) :] = 0
        for group, rows in zip(self.groups, block_rows, strict=True):
            group.fill(starts, counts, rows)

    def fill_decode(
        self, token_ids: IntArray, num_computed: IntArray, block_rows: Sequence[IntArray]
    ) -> None:
        """Fill one token of each of n <= B requests; the other rows become padding.

        ``token_ids``, ``num_computed`` [n]; ``block_rows`` by group [n, ...].
        """
        count = len(token_ids)
        self.places = num_computed.tolist()
        self.token_ids[:count, 0] = token_ids
        self.positions[:count, 0] = num_computed
        if count < self.spec.bucket:
            self.token_ids[count:] = 0
            self.positions[count:] = 0
        for group, rows in zip(self.groups, block_rows, strict=True):
            group.fill(num_computed, 1, rows)

    def advance_decode(self, token_ids: Sequence[Sequence[int]]) -> None:
        """Fill the next token ``token_ids`` [n, 1] of each request of the decode step in here.

        Nothing else has changed since, but see ``GroupInputs.put_blocks``.
        """
        self.places = places = [place + 1 for place in self.places]
        # Numpy's assignments and sums cost several times as much while their code is cold.
        form = f"{len(places)}q"
        pack_into(form, self.token_ids.data, 0, *[token for (token,) in token_ids])
        pack_into(form, self.positions.data, 0, *places)
        for group in self.groups:
            group.advance(places)

    def fill_verify(self, rows: DecodeRows, drafts: Sequence[Sequence[int]]) -> None:
        """Fill the latest token and the ``drafts`` of n <= B requests; the rest becomes padding.

        ``drafts`` [n], less than L of each.
        """
        count = len(drafts)
        for whole in (self.token_ids, self.positions):
            whole[...] = 0
        self.token_ids[:count, 0] = rows.token_ids
        self.positions[:count, 0] = rows.num_computed
        for row, tokens in enumerate(drafts):
            end, first = 1 + len(tokens), rows.num_computed[row]
            self.token_ids[row, 1:end] = tokens
            self.positions[row, 1:end] = np.arange(first + 1, first + end)
        # A graph writes all its query rows: padding goes to the slots of the request's later tokens
        # or to the null block, because vLLM ends a row of blocks with zeros.
        for group, blocks in zip(self.groups, rows.block_rows, strict=True):
            group.fill(rows.num_computed, 1, blocks)

    def fill_idle(self) -> None:
        """Fill every row with padding: the null block, and no adapter."""
        for whole in (self.token_ids, self.positions, self.token_indices, self.query_counts):
            whole[...] = 0
        self.fill_adapters(())
        for group in self.groups:
            for tensor in group.tensors.values():
                tensor.zero_()

    def fill_adapters(self, slots: Sequence[int]) -> None:
        """Fill the adapter slots of the first rows; the others have none."""
        if self.row_input is not None:
            self.row_input.fill(self.tensors[INPUT_NAME], slots)

    def fill_mask(self, counts: Sequence[int]) -> None:
        """Set the mask of the first ``counts[r]`` tokens or requests of each rank r."""
        for rows, number in zip(self.tokens_mask, counts, strict=False):
            count = number * self.spec.length
            rows[:count] = 1.0
            rows[count:] = 0.0


class DecodeRows(NamedTuple):
    """The arguments of ``StepInputs.fill_decode``."""

    token_ids: IntArray
    num_computed: IntArray
    block_rows: Sequence[IntArray]

    def with_prefills(self, requests: Sequence[CachedRequestState]) -> DecodeRows:
        """Return these rows, and after them the next prompt token of each of ``requests``."""
        return DecodeRows(
            np.append(self.token_ids, [r.get_token_id(r.num_computed_tokens) for r in requests]),
            np.append(self.num_computed, [r.num_computed_tokens for r in requests]),
            [
                np.append(
                    rows, padded_blocks([r.block_ids[group] for r in requests], rows.shape[1]), 0
                )
                for group, rows in enumerate(self.block_rows)
            ],
        )


def padded_blocks(lists: Sequence[Sequence[int]], width: int) -> IntArray:
    """Return [len(lists), width] int32, each list followed by the null block."""
    whole = np.zeros((len(lists), width), dtype=np.int32)
    for row, blocks in zip(whole, lists, strict=True):
        row[: len(blocks)] = blocks
    return whole


class LongestFirst:
    """Longest context first: kernels then stop at the last row that reaches a block column."""

    def __init__(self) -> None:
        self._order: list[int] | None = None
        self._rows = np.zeros(0, dtype=np.int64)

    def arrange(self, rows: DecodeRows, bucket: int) -> DecodeRows:
        """Return the rows of a step of ``bucket`` rows in this order; a copy, unless they are."""
        token_ids, num_computed, block_rows = rows
        if (num_computed[:-1] >= num_computed[1:]).all():
            self._order = None
            return rows
        order = np.argsort(-num_computed, kind="stable")
        self._order = order.tolist()
        rows_of = np.arange(bucket)
        rows_of[order] = np.arange(len(order))
        self._rows = rows_of
        return DecodeRows(token_ids[order], num_computed[order], [b[order] for b in block_rows])

    def rearrange(self, values: Sequence[T]) -> Sequence[T]:
        """Return values [requests] in the order of the latest arranged step."""
        return values if self._order is None else [values[row] for row in self._order]

    def place(self, row: int) -> int:
        """Return where the latest arranged step has ``row``."""
        return row if self._order is None else int(self._rows[row])

    def restore(self, output: Rows) -> Rows:
        """Return an output of the latest arranged step in scheduling order.

        [bucket, ...], or [requests, ...] without padding; a copy, unless the order is the same.
        """
        return output if self._order is None else output[self._rows[: len(output)]]


class AdapterRows:
    """The adapter slots of a step: one per request; none for requests without one and padding."""

    def __init__(self, adapters: Adapters, rows: LongestFirst | None) -> None:
        """``rows``: the order of decode steps, which the step's rows are in already."""
        self._adapters, self._rows = adapters, rows

    def fill(self, inputs: StepInputs, batch: StepBatch) -> None:
        """Called before every run; raises ``AdapterError`` for an adapter without a slot."""
        requests = batch.input_batch
        # All prompts of a chunk have one adapter.
        count = 1 if batch.phase.takes_chunk else batch.num_reqs
        ids = requests.request_lora_mapping[:count].tolist()
        slots = self._adapters.get_slots(ids, requests.lora_id_to_lora_request)
        slots += [self._adapters.get_slot(request) for request in batch.decode_prefill]
        if self._rows is not None and not batch.phase.takes_chunk:
            slots = [*self._rows.rearrange(slots)]
        inputs.fill_adapters(slots)
