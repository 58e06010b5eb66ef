"""The input buffers of one graph: allocated once, filled in place at every step."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rbln_backend.attention.metadata import RblnAttentionMetadata
from rbln_backend.compiler.port import GraphSpec, Phase

IntArray = npt.NDArray[np.int64] | npt.NDArray[np.int32]


@dataclass
class StepInputs:
    """B = batch size, L = query length, P = partitions of the block table.

    The numpy arrays are views of the tensors, so filling them fills the graph's inputs. Padding:
    token id 0, position 0, seq_idx 0 and the null block 0.
    """

    spec: GraphSpec
    token_ids: IntArray
    """[B, L] int64."""
    positions: IntArray
    """[B, L] int64."""
    token_indices: IntArray
    """[1] int64: the row whose logits a prefill wants."""
    seq_idx: IntArray
    """[B, P] int32, see ``RblnAttentionMetadata``."""
    block_tables: IntArray
    """[P] or [B, P] int32."""
    tensors: dict[str, Tensor]
    metadata: RblnAttentionMetadata
    partition_starts: IntArray
    """[P]: first position of each partition."""
    block_size: int

    @classmethod
    def allocate(
        cls, spec: GraphSpec, *, num_partitions: int, block_size: int, one_block: bool
    ) -> StepInputs:
        batch, length = spec.batch_size, spec.query_len
        is_prefill = spec.phase is Phase.PREFILL
        table_shape = (num_partitions,) if is_prefill else (batch, num_partitions)
        tensors = {
            "input_ids": torch.zeros(batch, length, dtype=torch.int64),
            "positions": torch.zeros(batch, length, dtype=torch.int64),
            "token_indices": torch.zeros(1, dtype=torch.int64),
            "seq_idx": torch.zeros(batch, num_partitions, dtype=torch.int32),
            "block_tables": torch.zeros(table_shape, dtype=torch.int32),
        }
        return cls(
            spec=spec,
            token_ids=tensors["input_ids"].numpy(),
            positions=tensors["positions"].numpy(),
            token_indices=tensors["token_indices"].numpy(),
            seq_idx=tensors["seq_idx"].numpy(),
            block_tables=tensors["block_tables"].numpy(),
            tensors=tensors,
            metadata=RblnAttentionMetadata(
                seq_idx=tensors["seq_idx"],
                block_tables=tensors["block_tables"],
                batch_size=batch,
                query_len=length,
                is_prefill=is_prefill,
                one_block=one_block,
            ),
            partition_starts=np.arange(num_partitions, dtype=np.int64) * block_size,
            block_size=block_size,
        )

    def fill_prefill(self, token_ids: IntArray, start: int, block_row: IntArray) -> None:
        """One chunk: ``token_ids`` [n <= L] at positions start.., blocks of the request."""
        count = len(token_ids)
        self.token_ids[0, :count] = token_ids
        self.token_ids[0, count:] = 0
        self.positions[0, :count] = np.arange(start, start + count)
        self.positions[0, count:] = 0
        self.token_indices[0] = count - 1
        fill = start - self.partition_starts
        np.clip(fill, 0, self.block_size, out=self.seq_idx[0], casting="unsafe")
        self.block_tables[:] = block_row[: len(self.block_tables)]

    def fill_decode(
        self, token_ids: IntArray, num_computed: IntArray, block_rows: IntArray
    ) -> None:
        """One token of each of n <= B requests; the other rows become padding.

        ``token_ids``, ``num_computed`` [n]; ``block_rows`` [n, >= P].
        """
        count, width = len(token_ids), self.block_tables.shape[1]
        self.token_ids[:count, 0] = token_ids
        self.token_ids[count:] = 0
        self.positions[:count, 0] = num_computed
        self.positions[count:] = 0
        fill = num_computed[:, None] - self.partition_starts
        np.clip(fill, 0, self.block_size, out=self.seq_idx[:count], casting="unsafe")
        self.seq_idx[count:] = 0
        self.block_tables[:count] = block_rows[:, :width]
        self.block_tables[count:] = 0
