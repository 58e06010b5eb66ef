"""The buffers of one graph hold real rows and harmless padding, whatever was there before."""

from __future__ import annotations

import numpy as np

from rbln_backend.compiler.port import GraphSpec, Phase
from rbln_backend.worker.step_inputs import StepInputs


def allocate(phase: Phase, bucket: int) -> StepInputs:
    inputs = StepInputs.allocate(
        GraphSpec.of(phase, bucket), num_partitions=3, block_size=16, one_block=False
    )
    for array in (inputs.token_ids, inputs.positions, inputs.seq_idx, inputs.block_tables):
        array.fill(99)
    return inputs


def test_prefill_chunk_in_the_second_block() -> None:
    inputs = allocate(Phase.PREFILL, 8)
    inputs.fill_prefill(np.arange(5, 10), start=20, block_row=np.array([7, 4, 0, 0]))
    assert inputs.token_ids.tolist() == [[5, 6, 7, 8, 9, 0, 0, 0]]
    assert inputs.positions.tolist() == [[20, 21, 22, 23, 24, 0, 0, 0]]
    assert inputs.token_indices.tolist() == [4]
    assert inputs.seq_idx.tolist() == [[16, 4, 0]]
    assert inputs.block_tables.tolist() == [7, 4, 0]


def test_decode_pads_rows_with_the_null_block() -> None:
    inputs = allocate(Phase.DECODE, 4)
    rows = np.array([[3, 0, 0, 0], [5, 6, 8, 0]])
    inputs.fill_decode(np.array([11, 12]), np.array([2, 40]), rows)
    assert inputs.token_ids.tolist() == [[11], [12], [0], [0]]
    assert inputs.positions.tolist() == [[2], [40], [0], [0]]
    assert inputs.seq_idx.tolist() == [[2, 0, 0], [16, 16, 8], [0, 0, 0], [0, 0, 0]]
    assert inputs.block_tables.tolist() == [[3, 0, 0], [5, 6, 8], [0, 0, 0], [0, 0, 0]]


def test_arrays_are_views_of_the_graph_inputs() -> None:
    inputs = allocate(Phase.DECODE, 2)
    inputs.fill_decode(np.array([11]), np.array([2]), np.array([[3, 0, 0]]))
    assert inputs.tensors["input_ids"].tolist() == [[11], [0]]
    assert inputs.metadata.seq_idx is inputs.tensors["seq_idx"]
