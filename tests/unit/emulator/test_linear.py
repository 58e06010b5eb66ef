"""The linear kernel: values, strides, packing, and bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated.kernel_set import set_threads
from rbln_backend.devices.emulated.packing import (
    can_pack,
    fits_in_place,
    pack_consuming,
    pack_reference,
    unpack,
)
from tests.unit.emulator.cases import DTYPES, assert_near, for_thread_counts

OPS = torch.ops.rbln_emulator


def make(rows: int, columns: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(rows, depth).to(dtype),
        (torch.randn(columns, depth) * depth**-0.5).to(dtype),
        torch.randn(columns).to(dtype),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "columns", "depth"),
    [
        *((1, 1, 1), (1, 33, 7), (2, 16, 64), (5, 100, 65), (7, 15, 300), (8, 48, 513)),
        *((14, 17, 31), (40, 130, 257), (200, 20, 129)),
    ],
)
def test_equals_float64(rows: int, columns: int, depth: int, dtype: torch.dtype) -> None:
    x, weight, bias = make(rows, columns, depth, dtype)
    packed = OPS.pack_linear_weight(weight)
    product = x.double() @ weight.double().T
    assert_near(OPS.linear(x, packed, None, columns), product)
    assert_near(OPS.linear(x, packed, bias, columns), product + bias.double())


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_row_has_the_bits_it_has_alone(dtype: torch.dtype) -> None:
    x, weight, bias = make(70, 50, 530, dtype)
    packed = OPS.pack_linear_weight(weight)
    alone = torch.cat([OPS.linear(row, packed, bias, 50) for row in x.split(1)])
    for rows in range(1, 71):
        assert torch.equal(OPS.linear(x[:rows], packed, bias, 50), alone[:rows]), rows
    big = torch.cat([x] * 6)
    assert torch.equal(OPS.linear(big, packed, bias, 50), torch.cat([alone] * 6))


@pytest.mark.parametrize("rows", [1, 3, 8, 70])
def test_threads_do_not_change_a_bit(rows: int) -> None:
    x, weight, bias = make(rows, 600, 700, torch.bfloat16)
    packed = OPS.pack_linear_weight(weight)
    one, two = for_thread_counts(lambda: OPS.linear(x, packed, bias, 600))
    assert torch.equal(one, two)


def test_a_nan_row_stays_alone() -> None:
    x, weight, _ = make(9, 40, 70, torch.float32)
    packed = OPS.pack_linear_weight(weight)
    clean = OPS.linear(x, packed, None, 40)
    x[4] = float("nan")
    dirty = OPS.linear(x, packed, None, 40)
    assert dirty[4].isnan().all()
    assert torch.equal(dirty[[0, 1, 2, 3, 5, 6, 7, 8]], clean[[0, 1, 2, 3, 5, 6, 7, 8]])


def test_strided_and_higher_dimensional_activations() -> None:
    x, weight, _ = make(12, 20, 33, torch.bfloat16)
    packed = OPS.pack_linear_weight(weight)
    plain = OPS.linear(x, packed, None, 20)
    padded = torch.full((12, 50), float("nan"), dtype=torch.bfloat16)
    padded[:, 10:43] = x
    assert torch.equal(OPS.linear(padded[:, 10:43], packed, None, 20), plain)
    assert torch.equal(OPS.linear(x.T.contiguous().T, packed, None, 20), plain)
    cube = OPS.linear(x.view(3, 4, 33).transpose(0, 1), packed, None, 20)
    assert torch.equal(cube, plain.view(3, 4, 20).transpose(0, 1))
    assert OPS.linear(x[:0], packed, None, 20).shape == (0, 20)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(1, 1), (16, 8), (33, 7), (40, 66), (160, 1026)])
def test_packing_matches_its_reference(columns: int, depth: int, dtype: torch.dtype) -> None:
    weight = torch.randn(columns, depth).to(dtype)
    packed = OPS.pack_linear_weight(weight)
    assert torch.equal(packed, pack_reference(weight))
    assert torch.equal(unpack(packed, columns, depth), weight)
    wide = torch.randn(columns, 2 * depth).to(dtype)
    assert torch.equal(
        OPS.pack_linear_weight(wide[:, :depth]), pack_reference(wide[:, :depth].contiguous())
    )


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("columns", "depth"), [(16, 2), (48, 34), (160, 1026), (20, 6), (16, 7)])
def test_packing_where_the_weight_lies(
    columns: int, depth: int, dtype: torch.dtype, threads: int
) -> None:
    weight = torch.randn(columns, depth).to(dtype)
    expected, address, fits = pack_reference(weight), weight.data_ptr(), fits_in_place(weight)
    set_threads(threads)
    packed = pack_consuming(weight)
    assert torch.equal(packed, expected)
    assert (packed.data_ptr() == address) == fits
    assert fits == (columns % 16 == 0 and (depth % 2 == 0 or dtype != torch.bfloat16))
    if not fits:
        with pytest.raises(RuntimeError, match="needs padding"):
            OPS.pack_linear_weight_(weight)


def test_which_weights_can_be_packed() -> None:
    assert can_pack(torch.zeros(3, 5, dtype=torch.bfloat16))
    assert not can_pack(torch.zeros(3, 5, dtype=torch.int8))
    assert not can_pack(torch.zeros(5))
    assert not can_pack(torch.zeros(0, 5))


def test_mistakes_are_named() -> None:
    x, weight, bias = make(2, 20, 33, torch.float32)
    packed = OPS.pack_linear_weight(weight)
    with pytest.raises(RuntimeError, match="32 features, the packed weight was made for 33"):
        OPS.linear(x[:, :32], packed, None, 20)
    with pytest.raises(RuntimeError, match="out_features 33 does not fit 2 panels"):
        OPS.linear(x, packed, None, 33)
    with pytest.raises(RuntimeError, match="bias has 19 elements instead of 20"):
        OPS.linear(x, packed, bias[:19], 20)
    with pytest.raises(RuntimeError, match="packed has dtype Float instead of BFloat16"):
        OPS.linear(x.bfloat16(), packed, None, 20)
