"""The buffers of one graph hold real rows and harmless padding, whatever was there before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rbln_backend.core import GraphSpec, Phase
from rbln_backend.lora.row_input import SlotMask, SlotNumbers
from rbln_backend.lora.slots import NO_ADAPTER
from rbln_backend.worker.group_inputs import KvGroup, PagedInputs, WindowInputs
from rbln_backend.worker.inputs import StepInputs

PAGED = KvGroup(layer_names=("a",), block_size=16, width=3, is_window=False, one_block=False)
WINDOW = KvGroup(layer_names=("b", "c"), block_size=24, width=1, is_window=True, one_block=False)


def allocate(
    phase: Phase, bucket: int, prompts: int = 1
) -> tuple[StepInputs, PagedInputs, WindowInputs]:
    spec = GraphSpec.of(phase, bucket, prompts=prompts)
    inputs = StepInputs.allocate(spec, [PAGED, WINDOW])
    paged, window = inputs.groups
    assert isinstance(paged, PagedInputs)
    assert isinstance(window, WindowInputs)
    for array in (inputs.token_ids, inputs.positions, paged.seq_idx, paged.block_tables):
        array.fill(99)
    for array in (window.cache_seq_len, window.cache_offset, window.block_tables):
        array.fill(99)
    return inputs, paged, window


def test_prefill_chunk_in_the_second_block() -> None:
    inputs, paged, window = allocate(Phase.PREFILL, 8)
    rows = [np.array([[7, 4, 0, 0]]), np.array([[2]])]
    inputs.fill_prefill([np.arange(5, 10)], np.array([20]), block_rows=rows)
    assert inputs.token_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert inputs.positions.tolist() == [[20, 21, 22, 23, 24, 0, 0, 0]]
    assert inputs.token_indices.tolist() == [4]
    assert paged.seq_idx.tolist() == [[20]]
    assert inputs.tensors["block_tables.0"].tolist() == [7, 4, 0]
    assert window.cache_seq_len.tolist() == [[20]]
    assert window.cache_offset.tolist() == [[25]]
    assert inputs.tensors["local_block_tables.1"].tolist() == [2]
    assert "query_counts" not in inputs.tensors


def test_a_full_window_counts_the_tokens_that_it_holds() -> None:
    inputs = StepInputs.allocate(GraphSpec.of(Phase.PREFILL, 8), [WINDOW])
    (window,) = inputs.groups
    assert isinstance(window, WindowInputs)
    inputs.fill_prefill([np.arange(5, 10)], np.array([40]), block_rows=[np.array([[2]])])
    assert window.cache_seq_len.tolist() == [[24]]
    assert window.cache_offset.tolist() == [[29]]


def test_the_prompts_of_a_chunk_are_concatenated() -> None:
    inputs, paged, window = allocate(Phase.PREFILL, 8, prompts=3)
    inputs.query_counts.fill(99)
    rows = [np.array([[7, 4, 0, 0], [3, 0, 0, 0]]), np.array([[2], [1]])]
    prompts = [np.array([5, 6, 7]), np.array([8, 9])]
    inputs.fill_prefill(prompts, np.array([30, 0]), block_rows=rows)
    assert inputs.token_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert inputs.positions.tolist() == [[30, 31, 32, 0, 1, 0, 0, 0]]
    assert inputs.tensors["token_indices"].tolist() == [2, 4, 0]
    assert inputs.tensors["query_counts"].tolist() == [3, 2, 0]
    assert inputs.tensors["seq_idx.0"].tolist() == [[30], [0], [0]]
    assert inputs.tensors["block_tables.0"].tolist() == [[7, 4, 0], [3, 0, 0], [0, 0, 0]]
    assert window.cache_seq_len.tolist() == [[24], [0], [0]]
    assert window.cache_offset.tolist() == [[27], [2], [0]]
    assert inputs.tensors["local_block_tables.1"].tolist() == [2, 1, 0]
    counts = {part.metadata.query_counts for part in (paged, window)}
    assert counts == {inputs.tensors["query_counts"]}
    inputs.fill_idle()
    assert all(not tensor.any() for tensor in inputs.tensors.values())


def test_decode_pads_rows_with_the_null_block() -> None:
    inputs, paged, window = allocate(Phase.DECODE, 4)
    rows = [np.array([[3, 0, 0, 0], [5, 6, 8, 0]]), np.array([[1, 0], [4, 0]])]
    inputs.fill_decode(np.array([11, 12]), np.array([2, 40]), rows)
    assert inputs.token_ids.tolist() == [[11], [12], [0], [0]]
    assert inputs.positions.tolist() == [[2], [40], [0], [0]]
    assert paged.seq_idx.tolist() == [[2], [40], [0], [0]]
    assert paged.block_tables.tolist() == [[3, 0, 0], [5, 6, 8], [0, 0, 0], [0, 0, 0]]
    assert window.cache_seq_len.tolist() == [[2], [24], [0], [0]]
    # A padded row has no new token: its offset equals its length.
    assert window.cache_offset.tolist() == [[3], [25], [0], [0]]
    assert window.block_tables.tolist() == [[1], [4], [0], [0]]


def test_arrays_are_views_of_the_graph_inputs() -> None:
    inputs, paged, window = allocate(Phase.DECODE, 2)
    rows = [np.array([[3, 0, 0]]), np.array([[1]])]
    inputs.fill_decode(np.array([11]), np.array([2]), rows)
    assert inputs.tensors["input_ids"].tolist() == [[11], [0]]
    assert inputs.tensors["seq_idx.0"].tolist() == [[2], [0]]
    assert inputs.tensors["local_block_tables.1"].tolist() == [[1], [0]]
    assert inputs.metadata == {"a": paged.metadata, "b": window.metadata, "c": window.metadata}


def test_adapter_slots_are_per_request_and_initially_none() -> None:
    without = StepInputs.allocate(GraphSpec.of(Phase.DECODE, 4), [PAGED])
    assert "lora_slots" not in without.tensors
    for phase, rows in ((Phase.DECODE, 4), (Phase.PREFILL, 1)):
        spec = GraphSpec.of(phase, 4)
        inputs = StepInputs.allocate(spec, [PAGED], row_input=SlotNumbers())
        assert inputs.tensors["lora_slots"].tolist() == [-1] * rows
        inputs.fill_adapters([2])
        assert inputs.tensors["lora_slots"].tolist() == [2, -1, -1, -1][:rows]
        inputs.fill_idle()
        assert inputs.tensors["lora_slots"].tolist() == [-1] * rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_mask_of_a_row_covers_its_slot(dtype: torch.dtype) -> None:
    mask = SlotMask(2, 3, dtype)
    tensor = mask.allocate(4)
    assert (tensor.shape, tensor.dtype) == ((4, 1, 6), dtype)
    for slots in ([1, NO_ADAPTER, 0], [NO_ADAPTER, 1], []):
        mask.fill(tensor, slots)
        rows = [[0] * 6, [1] * 3 + [0] * 3, [0] * 3 + [1] * 3]
        padded = [*slots, *[NO_ADAPTER] * (4 - len(slots))]
        assert tensor[:, 0].tolist() == [rows[slot + 1] for slot in padded]


def test_an_idle_rank_fills_padding_alone() -> None:
    for phase, bucket in ((Phase.PREFILL, 8), (Phase.DECODE, 4)):
        inputs, _, _ = allocate(phase, bucket)
        inputs.token_indices.fill(7)
        inputs.fill_idle()
        # Also the row of which a chunk computes logits: no other would be in the graph's range.
        assert all(not tensor.any() for tensor in inputs.tensors.values())


def test_the_mask_covers_the_rows_of_every_rank() -> None:
    spec = GraphSpec.of(Phase.DECODE, 4)
    inputs = StepInputs.allocate(spec, [PAGED], masked_ranks=2)
    inputs.fill_mask((3, 0))
    assert inputs.tensors["tokens_mask"].flatten().tolist() == [1, 1, 1, 0, 0, 0, 0, 0]
    inputs.fill_mask((1, 4))
    assert inputs.tensors["tokens_mask"].flatten().tolist() == [1, 0, 0, 0, 1, 1, 1, 1]
    assert inputs.tensors["tokens_mask"].shape == (8, 1)


def test_graphs_without_a_mask_have_no_mask_input() -> None:
    inputs = StepInputs.allocate(GraphSpec.of(Phase.DECODE, 4), [PAGED])
    inputs.fill_mask((3,))
    assert "tokens_mask" not in inputs.tensors
