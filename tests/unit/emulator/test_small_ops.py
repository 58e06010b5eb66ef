"""Norms, activations and rotary embedding: vLLM's rounding, odd sizes, strides, invariance."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from vllm.ir.ops.layernorm import fused_add_rms_norm as vllm_fused_add_rms_norm
from vllm.ir.ops.layernorm import rms_norm as vllm_rms_norm
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

from tests.unit.emulator.cases import DTYPES, assert_near, for_thread_counts

OPS = torch.ops.rbln_emulator
WIDTHS = (1, 7, 32, 100, 576, 2049)


def steps_apart(a: Tensor, b: Tensor) -> Tensor:
    """Return the number of representable values between a and b."""
    kind = torch.int32 if a.dtype == torch.float32 else torch.int16
    bits = [x.contiguous().view(kind).long() for x in (a, b)]
    lowest = torch.iinfo(kind).min
    ordered = [torch.where(x < 0, lowest - x, x) for x in bits]
    return (ordered[0] - ordered[1]).abs()


def assert_vllm_rounding(actual: Tensor, expected: Tensor) -> None:
    # vLLM rounds to the weight's dtype before it multiplies by the weight. Where the f32 value
    # lies on a rounding edge both neighbours are right, and the product may carry that one further.
    apart = steps_apart(actual, expected)
    assert int(apart.max()) <= (4 if actual.dtype == torch.float32 else 2)
    if actual.dtype != torch.float32:
        assert float((apart > 0).float().mean()) < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_norms_round_like_vllm(width: int, dtype: torch.dtype) -> None:
    x, residual = (torch.randn(40, width).to(dtype) for _ in range(2))
    for weight in (torch.randn(width).to(dtype), torch.randn(width)):
        assert_vllm_rounding(
            OPS.rms_norm(x, weight, 1e-5), vllm_rms_norm.impls["native"].impl_fn(x, weight, 1e-5)
        )
        normed, new_residual = OPS.fused_add_rms_norm(x, residual, weight, 1e-5)
        native = vllm_fused_add_rms_norm.impls["native"].impl_fn
        expected, expected_residual = native(x, residual, weight, 1e-5)
        assert_vllm_rounding(normed, expected)
        assert torch.equal(new_residual, expected_residual)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_layer_norm(width: int, dtype: torch.dtype) -> None:
    # A mean far from zero: a variance from plain squares would be lost in it.
    x = (torch.randn(40, width) + 30).to(dtype)
    weight, bias = (torch.randn(width).to(dtype) for _ in range(2))
    for scale, shift in ((weight, bias), (weight, None), (None, None)):
        wide = [None if t is None else t.double() for t in (scale, shift)]
        expected = functional.layer_norm(x.double(), (width,), *wide, 1e-5)
        assert_near(OPS.layer_norm(x, scale, shift, 1e-5), expected, scale=30)


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu2": lambda x: functional.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "softplus": functional.softplus,
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_activations(function: str, dtype: torch.dtype) -> None:
    for width in WIDTHS:
        x = (torch.randn(9, 2 * width) * 4).to(dtype)
        x[0] = torch.linspace(-120, 120, 2 * width).to(dtype)
        x[1, 0] = float("nan")
        gate, up = x.double().chunk(2, dim=-1)
        apply = FUNCTIONS[function]
        for gated, expected in ((True, apply(gate) * up), (False, apply(x.double()))):
            actual = OPS.activate(x, function, gated)
            assert torch.equal(actual.isnan(), expected.isnan())
            assert_near(actual.nan_to_num(), expected.nan_to_num())


def test_an_activation_without_a_name_is_refused() -> None:
    with pytest.raises(RuntimeError, match="function 'selu' is none of silu, gelu, "):
        OPS.activate(torch.ones(1, 2), "selu", False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("neox", [True, False])
@pytest.mark.parametrize(("head_size", "rotary"), [(64, 64), (80, 32), (6, 6), (128, 128)])
def test_rotary_embedding(head_size: int, rotary: int, neox: bool, dtype: torch.dtype) -> None:
    layer_cache = torch.randn(50, rotary).to(dtype)
    positions = torch.randint(0, 50, (11,))
    qkv = torch.randn(11, 5 * head_size).to(dtype)
    q, k, _ = qkv.split([3 * head_size, head_size, head_size], dim=-1)
    got = OPS.rotary_embedding(positions, q, k, layer_cache, head_size, neox)
    wide = RotaryEmbedding.forward_static(
        *(positions, q.double(), k.double(), head_size, rotary, layer_cache.double(), neox)
    )
    for actual, expected in zip(got, wide, strict=True):
        assert actual.is_contiguous()
        assert expected is not None
        assert_near(actual, expected)
    as_batch = OPS.rotary_embedding(positions.int().view(1, 11), q, k, layer_cache, head_size, neox)
    assert torch.equal(as_batch[0], got[0])


def test_rotary_positions_are_checked() -> None:
    q, k, cache = torch.randn(2, 8), torch.randn(2, 8), torch.randn(10, 8)
    for position in (-1, 10):
        with pytest.raises(IndexError, match=f"position {position} is outside .* of 10"):
            OPS.rotary_embedding(torch.tensor([0, position]), q, k, cache, 8, True)


def test_a_graph_cannot_divide_by_a_head_size_of_zero() -> None:
    """The number stands in stored graphs."""
    q, k, cache = torch.randn(2, 8), torch.randn(2, 8), torch.randn(10, 8)
    for head_size in (0, -8):
        with pytest.raises(RuntimeError, match=f"head_size is {head_size}"):
            OPS.rotary_embedding(torch.tensor([0, 1]), q, k, cache, head_size, True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_keep_their_bits_in_any_batch_stride_and_thread_count(dtype: torch.dtype) -> None:
    x, residual = (torch.randn(70, 1026).to(dtype) for _ in range(2))
    weight, cache = torch.randn(1026).to(dtype), torch.randn(70, 54).to(dtype)
    positions = torch.arange(70)

    def compute(rows: slice) -> Tensor:
        part, other = x[rows], residual[rows]
        results = [
            OPS.rms_norm(part, weight, 1e-6),
            *OPS.fused_add_rms_norm(part, other, weight, 1e-6),
            OPS.activate(part, "silu", True),
            OPS.activate(other, "gelu", False),
            OPS.layer_norm(part, weight, None, 1e-6),
            *OPS.rotary_embedding(positions[rows], part, other, cache, 54, True),
        ]
        return torch.cat(results, dim=-1)

    alone = torch.cat([compute(slice(i, i + 1)) for i in range(70)])
    for rows in (2, 5, 33, 70):
        assert torch.equal(compute(slice(rows)), alone[:rows])
    assert torch.equal(compute(slice(0, 70, 3)), alone[::3])
    x, residual, positions = x.repeat(3, 1), residual.repeat(3, 1), positions.repeat(3)
    for result in for_thread_counts(lambda: compute(slice(None))):
        assert torch.equal(result, alone.repeat(3, 1))


def test_leading_dimensions_that_do_not_collapse_are_copied() -> None:
    x = torch.randn(3, 4, 6, 10).permute(2, 0, 1, 3)
    weight = torch.randn(10)
    assert torch.equal(OPS.rms_norm(x, weight, 1e-6), OPS.rms_norm(x.contiguous(), weight, 1e-6))
    for gated in (True, False):
        same = OPS.activate(x.contiguous(), "gelu", gated)
        assert torch.equal(OPS.activate(x, "gelu", gated), same)
