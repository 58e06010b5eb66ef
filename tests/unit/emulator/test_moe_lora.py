"""Adapters of experts: values, rows without one, bits that do not depend on the company."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated import fallback
from rbln_backend.devices.emulated.packing import pack_reference
from tests.unit.emulator.cases import DTYPES, assert_near, for_thread_counts
from tests.unit.emulator.test_moe import ACTIVATIONS, Experts

OPS = torch.ops.rbln_emulator
SLOTS, RANK, ROWS, TOP_K = 3, 6, 12, 2


class AdaptedExperts(Experts):
    """Experts with an adapter in each slot, added to the weights or given to the op."""

    def __post_init__(self) -> None:
        super().__post_init__()
        inner, outer = self.intermediate_size, self.hidden_size
        slices = 1 if self.activation == "swigluoai" else 2
        self.down13 = self._stack(slices * RANK, outer)
        self.up13 = [self._stack(2 * inner // slices, RANK) for _ in range(slices)]
        self.down2, self.up2 = self._stack(RANK, inner), self._stack(outer, RANK)

    def _stack(self, outputs: int, inputs: int) -> Tensor:
        """[E, S, outputs, inputs]"""
        return self._made(self.count, SLOTS, outputs, inputs) * inputs**-0.5

    def lora(self, slots: list[int]) -> tuple[Any, ...]:
        """The last arguments of a call."""
        packed = [
            torch.stack([torch.stack([pack_reference(m) for m in slot]) for slot in stack])
            for stack in (self.down13, *self.up13, self.down2, self.up2)
        ]
        if len(self.up13) == 1:
            packed.insert(2, None)  # type: ignore[arg-type]
        return torch.tensor(slots, dtype=torch.int32), *packed, RANK

    def mixed(self, x: Tensor, weights: Tensor, ids: Tensor, slots: list[int]) -> Tensor:
        result: Tensor = OPS.moe(x, weights, ids, *self.arguments(), *self.lora(slots))
        return result

    def merged(self, slot: int) -> Experts:
        """Experts in float64 whose weights have the adapter of ``slot`` added."""
        plain = Experts(
            dtype=torch.float64,
            count=self.count,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            activation=self.activation,
        )
        lower = self.down13[:, slot].double().split(RANK, dim=1)
        first = [up[:, slot].double() @ a for up, a in zip(self.up13, lower, strict=True)]
        second = self.up2[:, slot].double() @ self.down2[:, slot].double()
        plain.w13 = self.w13.double() + torch.cat(first, dim=1)
        plain.w2 = self.w2.double() + second
        assert self.w13_bias is not None
        assert self.w2_bias is not None
        plain.w13_bias, plain.w2_bias = self.w13_bias.double(), self.w2_bias.double()
        return plain


def routed(count: int, rows: int = ROWS) -> tuple[Tensor, Tensor]:
    """Random weights and distinct ids [rows, TOP_K], now and then no expert."""
    ids = torch.stack([torch.randperm(count)[:TOP_K] for _ in range(rows)]).int()
    ids[rows // 2, 0] = -1
    return torch.rand(rows, TOP_K), ids


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("slots", [[2], [-1, 1, 0], [0, 1, 2, -1] * 3])
def test_equals_merged_weights(activation: str, slots: list[int]) -> None:
    experts = AdaptedExperts(activation=activation)
    x, (weights, ids) = experts.rows(ROWS), routed(experts.count)
    actual = experts.mixed(x, weights, ids, slots)
    plain = OPS.moe(x, weights, ids, *experts.arguments())
    for row in range(ROWS):
        slot = slots[row * len(slots) // ROWS]
        one = slice(row, row + 1)
        if slot < 0:
            assert torch.equal(actual[one], plain[one])
            continue
        expected = experts.merged(slot).expected(x[one], weights[one], ids[one])
        assert_near(actual[one], expected)
        assert not torch.allclose(actual[one].double(), plain[one].double(), rtol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_row_has_the_bits_it_has_alone(activation: str, dtype: torch.dtype) -> None:
    experts = AdaptedExperts(activation=activation, dtype=dtype)
    x, (weights, ids) = experts.rows(ROWS), routed(experts.count)
    slots = [row % (SLOTS + 1) - 1 for row in range(ROWS)]
    together = experts.mixed(x, weights, ids, slots)
    alone = [
        experts.mixed(x[row : row + 1], weights[row : row + 1], ids[row : row + 1], [slots[row]])
        for row in range(ROWS)
    ]
    assert torch.equal(together, torch.cat(alone))
    one, two = for_thread_counts(lambda: experts.mixed(x, weights, ids, slots))
    assert torch.equal(one, two)


def test_both_ways_to_choose_and_the_pytorch_body_agree() -> None:
    experts = AdaptedExperts()
    x, (weights, ids) = experts.rows(ROWS), routed(experts.count)
    slots = [1, -1, 2]
    mixed = experts.mixed(x, weights, ids, slots)
    table = torch.zeros(ROWS, experts.count + 1).scatter(
        1, ids.long() % (experts.count + 1), weights
    )
    table = table[:, :-1].contiguous()
    counts = (table != 0).sum(dim=0, dtype=torch.int32)
    arguments = (*experts.arguments(), *experts.lora(slots))
    assert torch.equal(OPS.moe_masked(x, table, counts, *arguments), mixed)
    torch.testing.assert_close(fallback.moe(x, weights, ids, *arguments), mixed)


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        (0, torch.zeros(5, dtype=torch.int32), "over 12 rows"),
        (0, torch.full((12,), SLOTS, dtype=torch.int32), rf"slots\[0\] is {SLOTS}"),
        (3, None, "wrong slices"),
        (4, torch.zeros(5, 3, 1, 23, 16), "a has shape"),
        (6, 0, "without a rank"),
    ],
)
def test_wrong_arguments_are_named(place: int, value: object, message: str) -> None:
    experts = AdaptedExperts()
    x, (weights, ids) = experts.rows(ROWS), routed(experts.count)
    given = list(experts.lora([0]))
    given[place] = value
    with pytest.raises((RuntimeError, IndexError), match=message):
        OPS.moe(x, weights, ids, *experts.arguments(), *given)
