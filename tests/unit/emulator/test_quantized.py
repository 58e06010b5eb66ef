"""Products with weights of 4 and 8 bits: values, and bits that do not depend on the batch."""

import math
from itertools import product

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated import fallback
from rbln_backend.devices.emulated.packing import (
    dequantize,
    pack_bytes,
    pack_scales,
    pack_transposed_words,
    pack_words,
    unpack_fields,
)
from tests.unit.emulator.cases import DTYPES, RELATIVE, for_thread_counts, one_dtype_each

OPS = torch.ops.rbln_emulator
WHOLE = -1
BITS = {"int4": 4, "uint4": 4, "int8": 8, "e4m3": 8, "e2m1": 4, "blocks8": 8}
FORMATS = tuple(BITS)
"""As the op knows them; "uint4" is "int4" with zero points."""
SHAPES = [
    # format, rows, columns, depth, group
    ("int4", 1, 16, 64, 64),
    ("int8", 1, 33, 128, 64),
    ("int4", 3, 100, 256, 128),
    ("int8", 6, 48, 40, WHOLE),
    ("int4", 7, 15, 72, WHOLE),
    ("int8", 13, 130, 512, 128),
    ("int4", 40, 20, 192, 64),
    ("int8", 200, 16, 576, WHOLE),
    ("uint4", 1, 33, 128, 64),
    ("uint4", 14, 48, 384, 128),
    ("e4m3", 1, 16, 128, 128),
    ("e4m3", 5, 50, 76, WHOLE),
    ("e4m3", 27, 40, 384, 64),
    ("e2m1", 1, 16, 32, 32),
    ("e2m1", 3, 50, 160, 32),
    ("e2m1", 20, 40, 288, 32),
    ("blocks8", 1, 33, 160, 32),
    ("blocks8", 3, 40, 48, 16),
    ("blocks8", 40, 40, 288, 32),
    ("blocks8", 2, 33, 160, 32),
    ("blocks8", 20, 40, 208, 16),
]


def e4m3(code: int) -> float:
    """The value of a byte: sign, four bits of exponent with bias 7, three of mantissa."""
    exponent, mantissa = code >> 3 & 15, code & 7
    size = math.ldexp(mantissa, -9) if exponent == 0 else math.ldexp(8 + mantissa, exponent - 10)
    return -size if code & 128 else size


def e2m1(code: int) -> float:
    """The value of a nibble: sign, two bits of exponent with bias 1, one of mantissa."""
    size = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)[code & 7]
    return -size if code & 8 else size


def packed(words: Tensor, written: str) -> Tensor:
    """Words int32 [N, K * bits / 32], whose fields are of the format ``written``, as panels."""
    if written == "e4m3":
        return pack_bytes(words.clone().view(torch.float8_e4m3fn))
    panels = pack_words(words.clone())
    assert torch.equal(panels, pack_transposed_words(words.t().contiguous()))
    return panels


class Weight:
    """A random weight and the scales that its dtype holds."""

    def __init__(
        self, written: str, columns: int, depth: int, group: int, dtype: torch.dtype
    ) -> None:
        group = depth if group == WHOLE else group
        bits, shape = BITS[written], (columns, depth // group)
        self.format = "int4" if written == "uint4" else written
        self.columns = columns
        # Every field of every word has some of all its values, but for the NaN of e4m3.
        numbers = torch.randint(0, 2**bits, (columns, depth))
        if written == "e4m3":
            numbers[numbers % 128 == 127] = 3
        words = (numbers.unflatten(1, (-1, 32 // bits)) << torch.arange(0, 32, bits)).sum(-1)
        words = torch.where(words >= 2**31, words - 2**32, words).int()
        scales = ((torch.rand(shape) + 0.5) * 2.0 ** (1 - bits)).to(dtype)
        factors, zeros = scales.double(), None
        if written == "e2m1":
            scales = torch.randint(120, 127, shape, dtype=torch.uint8)
            factors = 2.0 ** (scales.double() - 127)
        if written == "uint4":
            zeros = torch.randint(0, 16, shape, dtype=torch.uint8)
        if written == "blocks8":
            words = (numbers - 128).to(torch.int8).view(torch.int32)
        values = self._values(written, numbers, zeros).unflatten(1, (-1, group))
        self.values = (values * factors.unsqueeze(-1)).flatten(1)
        self.zeros = None if zeros is None else pack_scales(zeros)
        self.words, self.scales = packed(words, written), pack_scales(scales)

    @staticmethod
    def _values(written: str, numbers: Tensor, zeros: Tensor | None) -> Tensor:
        if zeros is not None:
            spread = zeros.repeat_interleave(numbers.shape[1] // zeros.shape[1], dim=1)
            return (numbers - spread).double()
        if written in ("e4m3", "e2m1"):
            value = {"e4m3": e4m3, "e2m1": e2m1}[written]
            return torch.tensor([value(code) for code in range(256)]).double()[numbers]
        return (numbers - 2 ** (BITS[written] - 1)).double()

    @property
    def parts(self) -> tuple[Tensor, Tensor, Tensor | None]:
        return self.words, self.scales, self.zeros

    def product(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        product: Tensor = OPS.quantized_linear(x, *self.parts, bias, self.columns, self.format)
        return product


def smallest_group(written: str) -> int:
    return {"blocks8": 16, "e2m1": 32}.get(written, 64)


def assert_near(actual: Tensor, x: Tensor, weight: Weight, bias: Tensor) -> None:
    """As exact as its dtype; activations of 16 bits lose 2^-16 of the largest beside them."""
    exact = x.double() @ weight.values.T
    terms = x.double().abs() @ weight.values.abs().T
    blunt = 0.0
    if x.dtype != torch.float32 and weight.format not in ("e4m3", "blocks8"):
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


@pytest.mark.parametrize(("case", "dtype"), one_dtype_each(SHAPES))
def test_equals_float64(case: tuple[str, int, int, int, int], dtype: torch.dtype) -> None:
    written, rows, columns, depth, group = case
    weight = Weight(written, columns, depth, group, dtype)
    x, bias = torch.randn(rows, depth).to(dtype), torch.randn(columns).to(dtype)
    assert_near(weight.product(x, bias), x, weight, bias)
    values = dequantize(*weight.parts, columns, weight.format)
    assert torch.equal(values, weight.values.float())
    args = (x, *weight.parts, bias, columns, weight.format)
    assert_near(fallback.quantized_linear(*args), x, weight, bias)


@pytest.mark.parametrize("written", ["e4m3", "e2m1"])
def test_every_float_is_the_number_that_it_stands_for(written: str) -> None:
    """One input at a time: the product is the weight, for all codes and scales."""
    bits, depth = BITS[written], 32
    codes = [code for code in range(2**bits) if code % 128 != 127]
    numbers = torch.tensor(codes * depth)[: len(codes) // 4 * 4 * depth].view(-1, depth)
    words = (numbers.unflatten(1, (-1, 32 // bits)) << torch.arange(0, 32, bits)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    scales = torch.full((len(numbers), 1), 2.0**-100)
    factors = scales.double()
    if written == "e2m1":
        scales = (torch.arange(len(numbers)) * 17 % 250).to(torch.uint8).unsqueeze(1)
        factors = 2.0 ** (scales.double() - 127)
    value = {"e4m3": e4m3, "e2m1": e2m1}[written]
    exact = torch.tensor([value(code) for code in range(2**bits)]).double()[numbers] * factors
    parts = (packed(words, written), pack_scales(scales), None, None)
    product = OPS.quantized_linear(torch.eye(depth), *parts, len(numbers), written)
    assert torch.equal(product.T, exact.float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [2.0**-100, 1e-30, 1.0, 1e3])
@pytest.mark.parametrize("written", ["int4", "e2m1"])
def test_activations_of_any_size(size: float, dtype: torch.dtype, written: str) -> None:
    weight = Weight(written, 32, 128, 64 if written == "int4" else 32, dtype)
    x = (torch.randn(4, 128).clamp(-2, 2) * size).to(dtype)
    x[1] = 0
    assert_near(weight.product(x), x, weight, torch.zeros(32))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("written", FORMATS)
def test_every_row_has_the_bits_it_has_alone(written: str, dtype: torch.dtype) -> None:
    weight = Weight(written, 50, 704, smallest_group(written), dtype)
    x = torch.randn(110, 704).to(dtype)
    alone = torch.cat([weight.product(row) for row in x.split(1)])
    for rows in (*range(2, 20), 48, 96, 97, 110):
        assert torch.equal(weight.product(x[:rows]), alone[:rows]), rows
    for result in for_thread_counts(lambda: weight.product(x)):
        assert torch.equal(result, alone)


@pytest.mark.parametrize(
    ("case", "dtype"),
    one_dtype_each(product(["int8", "uint4", "e4m3", "e2m1", "blocks8"], [math.nan, math.inf])),
)
def test_a_row_that_is_not_finite_stays_alone(case: tuple[str, float], dtype: torch.dtype) -> None:
    written, value = case
    weight = Weight(written, 40, 128, smallest_group(written), dtype)
    x = torch.randn(9, 128).to(dtype)
    clean = weight.product(x)
    x[4, 77] = value
    dirty = weight.product(x)
    assert not dirty[4].isfinite().any()
    others = [row for row in range(9) if row != 4]
    assert torch.equal(dirty[others], clean[others])


EXPERTS = [
    "int4 int4 silu",
    "e2m1 e2m1 swigluoai",
    "uint4 int8 silu",
    "int8 uint4 silu",
    "e4m3 e2m1 silu",
    "blocks8 blocks8 silu",
]


@pytest.mark.parametrize(("case", "dtype"), one_dtype_each(EXPERTS))
def test_experts_equal_plain_ones(case: str, dtype: torch.dtype) -> None:
    first, second, activation = case.split()
    count, hidden, inner, rows = 5, 128, 64, 9
    w13, w2 = (
        [Weight(written, columns, depth, smallest_group(written), dtype) for _ in range(count)]
        for written, columns, depth in ((first, 2 * inner, hidden), (second, hidden, inner))
    )
    x = torch.randn(rows, hidden).to(dtype)
    weights, ids = OPS.moe_route(torch.randn(rows, count), 2, True, None, None)
    biases = torch.randn(count, 2 * inner).to(dtype), torch.randn(count, hidden).to(dtype)
    experts = (*_stacked(w13, biases[0]), *_stacked(w2, biases[1]), inner, activation)
    mixed = OPS.quantized_moe(x, weights, ids, *experts)
    plain = [torch.stack([weight.values.float() for weight in stack]) for stack in (w13, w2)]
    exact = fallback.moe(
        x.float(),
        weights,
        ids,
        plain[0],
        biases[0].float(),
        plain[1],
        biases[1].float(),
        inner,
        activation,
    )
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-6, torch.float16: 2**-9}[dtype]
    torch.testing.assert_close(
        mixed.float(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max())
    )
    table = torch.zeros(rows, count).scatter(1, ids.long(), weights)
    counts = (table != 0).sum(0, dtype=torch.int32)
    assert torch.equal(OPS.quantized_moe_masked(x, table, counts, *experts), mixed)
    ids[3, 0] = -1
    one_less = OPS.quantized_moe(x, weights, ids, *experts).float()
    slow = fallback.quantized_moe(x, weights, ids, *experts)
    torch.testing.assert_close(
        slow.float(), one_less, rtol=tolerance, atol=tolerance * float(exact.abs().max())
    )


def _stacked(
    weights: list[Weight], bias: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, str]:
    words, scales = (
        torch.stack([getattr(weight, name) for weight in weights]) for name in ("words", "scales")
    )
    zeros = [weight.zeros for weight in weights if weight.zeros is not None]
    return words, scales, torch.stack(zeros) if zeros else None, bias, weights[0].format


def test_what_does_not_fit_is_refused() -> None:
    weight = Weight("int4", 32, 128, 64, torch.float32)
    x, words, scales = torch.randn(2, 128), weight.words, weight.scales
    less, zeros = x[:, :64].contiguous(), scales[:, :1].byte().contiguous()
    for reason, arguments in (
        ("format is 'int3', known are int4, int8, e4m3, e2m1 and", (x, scales, None, "int3")),
        ("not that of a packed int4 weight", (less, scales, None, "int4")),
        ("not that of a packed e4m3 weight", (x, scales, None, "e4m3")),
        ("do not share", (x, scales.repeat(1, 2, 1), None, "int4")),
        ("scales of e2m1 have dtype", (x, scales, None, "e2m1")),
        ("zeros of int4 has shape", (x, scales, zeros, "int4")),
    ):
        rows, by, points, written = arguments
        with pytest.raises(RuntimeError, match=reason):
            OPS.quantized_linear(rows, words, by, points, None, 32, written)
