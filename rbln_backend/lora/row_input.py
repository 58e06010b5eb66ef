"""The input of a graph that holds the adapter slot of each row, in two forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from rbln_backend.lora.slots import NO_ADAPTER


class RowInput(Protocol):
    """Makes and fills the input of a graph."""

    def allocate(self, rows: int) -> Tensor:
        """Return the input of ``rows`` rows without adapters."""
        ...

    def fill(self, tensor: Tensor, slots: Sequence[int]) -> None:
        """Fill an input with the slots of its first rows; the others have none."""
        ...


class SlotNumbers:
    """int32 [B]: the slot of each row, for a kernel that skips rows without one."""

    def allocate(self, rows: int) -> Tensor:
        """As ``RowInput``, [rows]."""
        return torch.full((rows,), NO_ADAPTER, dtype=torch.int32)

    def fill(self, tensor: Tensor, slots: Sequence[int]) -> None:
        """As ``RowInput``, tensor [B]."""
        numbers = tensor.numpy()
        numbers[: len(slots)] = slots
        numbers[len(slots) :] = NO_ADAPTER


class SlotMask:
    """[B, 1, S * rank]: ones at the columns of a row's slot, for products with all slots."""

    def __init__(self, slots: int, rank: int, dtype: torch.dtype) -> None:
        own = torch.eye(slots, dtype=dtype).repeat_interleave(rank, dim=1)
        self._masks = torch.cat((torch.zeros(1, slots * rank, dtype=dtype), own))
        """Of no adapter first, then of each slot."""

    def allocate(self, rows: int) -> Tensor:
        """As ``RowInput``, [rows, 1, S * rank]."""
        return self._masks.new_zeros(rows, 1, self._masks.shape[1])

    def fill(self, tensor: Tensor, slots: Sequence[int]) -> None:
        """As ``RowInput``, tensor [B, 1, S * rank]."""
        rows = [*slots, *(NO_ADAPTER,) * (len(tensor) - len(slots))]
        numbers = torch.tensor(rows) - NO_ADAPTER
        torch.index_select(self._masks, 0, numbers, out=tensor.view(len(tensor), -1))
