"""Products with weights of 4 and 8 bits: values, and bits that do not depend on the batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rbln_backend.emulator import fallback, fallback_moe
from rbln_backend.emulator.quantized_packing import (
    dequantize,
    pack_scales,
    pack_transposed_words,
    pack_words,
    unpack_fields,
)
from tests.unit.emulator.cases import DTYPES, RELATIVE, for_thread_counts

OPS = torch.ops.rbln_emulator
WHOLE = -1
SHAPES = [
    # bits, rows, columns, depth, group
    *((4, 1, 16, 64, 64), (8, 1, 33, 128, 64), (4, 3, 100, 256, 128), (8, 6, 48, 40, WHOLE)),
    *(
        (4, 7, 15, 72, WHOLE),
        (8, 13, 130, 512, 128),
        (4, 40, 20, 192, 64),
        (8, 200, 16, 576, WHOLE),
    ),
]


class Weight:
    """A random weight and the scales that its dtype holds."""

    def __init__(self, bits: int, columns: int, depth: int, group: int, dtype: torch.dtype) -> None:
        group = depth if group == WHOLE else group
        self.bits, self.columns = bits, columns
        # Every field of every word has some of all its values.
        words = torch.randint(-(2**31), 2**31, (columns, depth * bits // 32)).int()
        scales = ((torch.rand(columns, depth // group) + 0.5) * 2.0 ** (1 - bits)).to(dtype)
        values = unpack_fields(words, bits).double().unflatten(1, (-1, group))
        self.values = (values * scales.double().unsqueeze(-1)).flatten(1)
        self.transposed = pack_transposed_words(words.t().contiguous())
        self.words, self.scales = pack_words(words.clone()), pack_scales(scales)

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        product: Tensor = OPS.quantized_linear(
            x, self.words, self.scales, bias, self.columns, self.bits
        )
        return product


def assert_near(actual: Tensor, x: Tensor, weight: Weight, bias: Tensor) -> None:
    """As exact as its dtype; activations of 16 bits lose 2^-16 of the largest beside them."""
    exact = x.double() @ weight.values.T
    terms = x.double().abs() @ weight.values.abs().T
    blunt = 0.0
    if x.dtype != torch.float32:
        largest = x.double().abs().amax(-1, keepdim=True)
        blunt = 2.0**-15 * (largest @ weight.values.abs().sum(1, keepdim=True).T)
    exact = exact + bias.double()
    allowed = RELATIVE[x.dtype] * 1.01 * exact.abs() + 3e-6 * terms + blunt
    assert actual.shape == exact.shape
    assert bool(((actual.double() - exact).abs() <= allowed).all())


def test_the_first_field_is_the_lowest() -> None:
    words = torch.tensor([[0x76543210, -0x01234568]], dtype=torch.int32)
    assert unpack_fields(words, 4).tolist() == [[*range(-8, 8)]]
    assert unpack_fields(words[:, :1], 8).tolist() == [[0x10 - 128, 0x32 - 128, 0x54 - 128, -10]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "rows", "columns", "depth", "group"), SHAPES)
def test_equals_float64(
    bits: int, rows: int, columns: int, depth: int, group: int, dtype: torch.dtype
) -> None:
    weight = Weight(bits, columns, depth, group, dtype)
    x, bias = torch.randn(rows, depth).to(dtype), torch.randn(columns).to(dtype)
    assert_near(weight.product(x, bias), x, weight, bias)
    assert torch.equal(weight.transposed, weight.words)
    plain = dequantize(weight.words, weight.scales, columns, bits)
    assert torch.equal(plain, weight.values.float())
    args = (x, weight.words, weight.scales, bias, columns, bits)
    assert_near(fallback.quantized_linear(*args), x, weight, bias)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2.0**-100, 1e-30, 1.0, 1e3])
def test_activations_of_any_size(size: float, dtype: torch.dtype) -> None:
    weight = Weight(4, 32, 128, 64, dtype)
    x = (torch.randn(4, 128).clamp(-2, 2) * size).to(dtype)
    x[1] = 0
    assert_near(weight.product(x), x, weight, torch.zeros(32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_every_row_has_the_bits_it_has_alone(bits: int, dtype: torch.dtype) -> None:
    weight = Weight(bits, 50, 704, 64, dtype)
    x = torch.randn(110, 704).to(dtype)
    alone = torch.cat([weight.product(row) for row in x.split(1)])
    for rows in (*range(2, 20), 48, 96, 97, 110):
        assert torch.equal(weight.product(x[:rows]), alone[:rows]), rows
    for result in for_thread_counts(lambda: weight.product(x)):
        assert torch.equal(result, alone)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_row_that_is_not_finite_stays_alone(value: float, dtype: torch.dtype) -> None:
    weight = Weight(8, 40, 128, 64, dtype)
    x = torch.randn(9, 128).to(dtype)
    clean = weight.product(x)
    x[4, 77] = value
    dirty = weight.product(x)
    assert not dirty[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(dirty[others], clean[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "swigluoai"])
def test_experts_equal_plain_ones(activation: str, dtype: torch.dtype) -> None:
    count, hidden, inner, rows = 5, 128, 64, 9
    w13 = [Weight(4, 2 * inner, hidden, 64, dtype) for _ in range(count)]
    w2 = [Weight(4, hidden, inner, 64, dtype) for _ in range(count)]
    x = torch.randn(rows, hidden).to(dtype)
    weights, ids = OPS.moe_route(torch.randn(rows, count), 2, True, None, None)
    biases = torch.randn(count, 2 * inner).to(dtype), torch.randn(count, hidden).to(dtype)
    stacked = [
        torch.stack([getattr(weight, name) for weight in stack])
        for stack in (w13, w2)
        for name in ("words", "scales")
    ]
    experts = (*stacked[:2], biases[0], *stacked[2:], biases[1], 4, inner, activation)
    mixed = OPS.quantized_moe(x, weights, ids, *experts)
    plain = [torch.stack([weight.values.float() for weight in stack]) for stack in (w13, w2)]
    exact = fallback_moe.moe(
        *(x.float(), weights, ids, plain[0], biases[0].float(), plain[1], biases[1].float()),
        *(inner, activation),
    )
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(
        mixed.float(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max())
    )
    table = torch.zeros(rows, count).scatter(1, ids.long(), weights)
    counts = (table != 0).sum(0, dtype=torch.int32)
    assert torch.equal(OPS.quantized_moe_masked(x, table, counts, *experts), mixed)
    slow = fallback_moe.quantized_moe(x, weights, ids, *experts)
    torch.testing.assert_close(
        slow.float(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max())
    )


def test_what_does_not_fit_is_refused() -> None:
    weight = Weight(4, 32, 128, 64, torch.float32)
    x = torch.randn(2, 128)
    with pytest.raises(RuntimeError, match="bits is 3, known are 4 and 8"):
        OPS.quantized_linear(x, weight.words, weight.scales, None, 32, 3)
    with pytest.raises(RuntimeError, match="not that of a packed 4-bit weight"):
        OPS.quantized_linear(x[:, :64].contiguous(), weight.words, weight.scales, None, 32, 4)
    with pytest.raises(RuntimeError, match="not that of a packed 8-bit weight"):
        OPS.quantized_linear(x, weight.words, weight.scales, None, 32, 8)
    with pytest.raises(RuntimeError, match="do not share"):
        OPS.quantized_linear(x, weight.words, weight.scales.repeat(1, 2, 1), None, 32, 4)
