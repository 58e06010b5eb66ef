"""Slots side by side, as graphs of an NPU multiply by them, against each row's own product."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rbln_backend.errors import AdapterError
from rbln_backend.lora.row_input import SlotMask
from rbln_backend.lora.slot_stack import MatrixStack, SlotStack

SLOTS, RANK, INPUTS, OUTPUTS = 3, 8, 20, (12, 4, 4)


def stack_of(outputs: Sequence[int], dtype: torch.dtype = torch.float32) -> MatrixStack:
    sizes = {"slots": SLOTS, "rank": RANK, "inputs": INPUTS}
    return MatrixStack.on_device(**sizes, outputs=outputs, dtype=dtype, resident=lambda x: x)


def matrices(rank: int, outputs: Sequence[int]) -> tuple[list[Tensor], list[Tensor]]:
    """One adapter: A and B of each slice."""
    return (
        [torch.randn(rank, INPUTS) for _ in outputs],
        [torch.randn(size, rank) for size in outputs],
    )


@pytest.mark.parametrize("outputs", [OUTPUTS, (16,)])
@pytest.mark.parametrize(("rows", "length"), [(5, 1), (1, 7), (4, 3)])
def test_each_row_has_its_own_adapter(outputs: Sequence[int], rows: int, length: int) -> None:
    stack, mask = stack_of(outputs), SlotMask(SLOTS, RANK, torch.float32)
    adapters = {0: matrices(8, outputs), 2: matrices(3, outputs)}
    for slot, (a, b) in adapters.items():
        stack.write(slot, stack.image(a, b))
    slots = [(0, -1, 2, 1)[n % 4] for n in range(rows)]
    chosen = mask.allocate(rows)
    mask.fill(chosen, slots)
    x, y = torch.randn(rows, length, INPUTS), torch.randn(rows, length, sum(outputs))
    expected = y.clone()
    for row, slot in enumerate(slots):
        if slot in adapters:
            parts = [x[row] @ a.T @ b.T for a, b in zip(*adapters[slot], strict=True)]
            expected[row] += torch.cat(parts, dim=-1)
    torch.testing.assert_close(stack.add(y, x, chosen), expected)
    # Experts have rows of tokens.
    flat = stack.add(y.flatten(0, 1), x.flatten(0, 1), chosen)
    torch.testing.assert_close(flat, expected.flatten(0, 1))


def test_a_slot_keeps_nothing_of_the_last_adapter() -> None:
    stack = stack_of(OUTPUTS)
    (one, other), small = (matrices(RANK, OUTPUTS) for _ in range(2)), matrices(2, OUTPUTS)
    stack.write(0, stack.image(*one))
    stack.write(1, stack.image(*other))
    kept = [tensor.clone() for tensor in stack.homes]
    stack.write(1, stack.image(*small))
    fresh = stack_of(OUTPUTS)
    fresh.write(0, fresh.image(*one))
    fresh.write(1, fresh.image(*small))
    assert all(map(torch.equal, stack.homes, fresh.homes))
    stack.write(1, None)
    stack.write(1, stack.image(*other))
    assert all(map(torch.equal, stack.homes, kept))
    stack.write(0, None)
    stack.write(1, None)
    assert not any(tensor.any() for tensor in stack.homes)


def test_values_beyond_the_dtype_are_refused() -> None:
    """Multiplied by the mask's zeros, infinity would be NaN in the rows of others."""
    a, b = matrices(2, (4,))
    b[0][1, 1] = 1e6
    for stack in (
        stack_of((4,), torch.float16),
        SlotStack.allocate(slots=1, rank=2, inputs=INPUTS, outputs=(4,), dtype=torch.float16),
    ):
        with pytest.raises(AdapterError, match="has values beyond float16"):
            stack.image(a, b)
