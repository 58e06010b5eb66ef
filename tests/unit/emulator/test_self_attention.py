"""The fused attention layer: bit for bit what its parts give one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated import fallback
from tests.unit.emulator.cases import DTYPES

OPS, ATTENTION = torch.ops.rbln_emulator, torch.ops.rbln_emulated_ops
KV_HEADS, GROUP, HEAD_SIZE, BLOCK_SIZE = 2, 3, 32, 16
HEADS = (KV_HEADS * GROUP, KV_HEADS, KV_HEADS)
EPS = 1e-6


@dataclass
class Layer:
    """The inputs of one attention layer for ``batch`` requests with ``length`` new tokens each."""

    dtype: torch.dtype
    batch: int
    length: int
    window: bool
    normed: bool = True
    rotated: bool = True
    e4m3: bool = False

    def __post_init__(self) -> None:
        tokens, dtype = self.batch * self.length, self.dtype
        self.qkv = torch.randn(tokens, sum(HEADS) * HEAD_SIZE + 5).to(dtype)
        self.norms = [torch.randn(HEAD_SIZE).to(dtype) if self.normed else None for _ in "qk"]
        self.positions = torch.arange(tokens) % 50 if self.rotated else None
        self.rotary = torch.randn(50, HEAD_SIZE - 8).to(dtype)
        shape = (1 + 4 * self.batch, 2, KV_HEADS, 1, BLOCK_SIZE, HEAD_SIZE)
        self.cache = torch.randn(shape).to(torch.float8_e4m3fn if self.e4m3 else dtype)
        scales = (torch.tensor(0.02), torch.tensor(1.5)) if self.e4m3 else (None, None)
        self.cache_scales = scales
        self.scale = torch.tensor(HEAD_SIZE**-0.5)
        self.starts = torch.arange(3, 3 + self.batch, dtype=torch.int32).unsqueeze(1)
        self.ends = self.starts + self.length if self.window else None
        pages = torch.randperm(4 * self.batch) + 1
        self.tables = (pages[: self.batch] if self.window else pages).view(self.batch, -1)
        self.sinks = torch.randn(KV_HEADS * GROUP)
        self.slopes = torch.rand(KV_HEADS * GROUP)

    @property
    def rows(self) -> list[Tensor]:
        return list(self.qkv.split([*(h * HEAD_SIZE for h in HEADS), 5], dim=-1))[:3]

    def fused(self, cache: Tensor, *, apart: bool) -> tuple[object, ...]:
        """The arguments of the fused op, with q, k and v as one tensor or as three."""
        columns = [0, HEADS[0] * HEAD_SIZE, (HEADS[0] + HEADS[1]) * HEAD_SIZE]
        parts = [(x, 0) for x in self.rows] if apart else [(self.qkv, c) for c in columns]
        return (
            *(item for part in parts for item in part),
            *(*self.norms, EPS, self.positions, self.rotary if self.rotated else None, True),
            *(cache, self.scale, self.starts, self.ends, self.tables, self.sinks, 5.0),
            *(self.slopes, *self.cache_scales, *((None, None) if self.window else (7, 20))),
            *(GROUP, self.batch),
        )

    def one_by_one(self, cache: Tensor) -> Tensor:
        rows = [x.contiguous() for x in self.rows]
        for i, norm in enumerate(self.norms):
            if norm is not None:
                heads = rows[i].view(-1, HEAD_SIZE)
                rows[i] = OPS.rms_norm(heads, norm, EPS).view(rows[i].shape)
        if self.positions is not None:
            rows[:2] = OPS.rotary_embedding(self.positions, *rows[:2], self.rotary, HEAD_SIZE, True)
        heads = [
            x.view(self.batch, self.length, KV_HEADS, -1, HEAD_SIZE).permute(0, 2, 3, 1, 4)
            for x in rows
        ]
        rest = (self.tables, self.scale, self.sinks, 5.0, self.slopes, *self.cache_scales)
        if self.ends is None:
            out = ATTENTION.flash_causal_attention_naive_prefill(
                *heads, cache, self.scale, self.starts, *rest, 7, 20
            )
        else:
            out = ATTENTION.sliding_window_attention_naive_prefill(
                *heads, cache, self.starts, self.ends, self.scale, *rest
            )
        result: Tensor = out.permute(0, 3, 1, 2, 4).reshape(self.qkv.shape[0], -1)
        return result


CASES = [
    {"batch": 1, "length": 20, "window": False},
    {"batch": 5, "length": 1, "window": False, "normed": False},
    {"batch": 1, "length": 9, "window": True, "rotated": False},
    {"batch": 4, "length": 1, "window": True},
    {"batch": 3, "length": 2, "window": False, "normed": False, "rotated": False},
    {"batch": 2, "length": 7, "window": False, "normed": False, "rotated": False, "e4m3": True},
    {"batch": 3, "length": 2, "window": True, "normed": False, "rotated": False, "e4m3": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_equals_its_parts(case: dict[str, int], dtype: torch.dtype) -> None:
    layer = Layer(dtype, **case)
    expected_cache = layer.cache.clone()
    expected = layer.one_by_one(expected_cache)
    for apart in (False, True):
        cache = layer.cache.clone()
        assert torch.equal(OPS.self_attention(*layer.fused(cache, apart=apart)), expected)
        assert torch.equal(cache, expected_cache)
    plain = fallback.self_attention(*layer.fused(layer.cache, apart=False))
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(plain, expected, rtol=4 * step, atol=8 * step)
    caches = layer.cache.float(), expected_cache.float()
    torch.testing.assert_close(*caches, rtol=4 * step, atol=2 * step)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", CASES[:3])
def test_opcheck(case: dict[str, int], dtype: torch.dtype) -> None:
    layer = Layer(dtype, **case)
    torch.library.opcheck(OPS.self_attention.default, layer.fused(layer.cache, apart=False))


def test_mistakes_are_named() -> None:
    layer = Layer(torch.float32, batch=2, length=1, window=False)
    for place, value, message in (
        (1, 400, r"q has shape \[2, 325\]; expected 2 rows with 6 heads of 32 from column 400 on"),
        # Sums and products that would overflow.
        (1, 2**63 - 1, r"q has shape .* from column 9223372036854775807 on"),
        (24, 2**62, r"q has shape .* and groups of 4611686018427387904"),
        (2, layer.qkv[:1], r"k has shape \[1, 325\]; expected 2 rows with 2 heads"),
        (4, layer.qkv.double(), "k or v has dtype Double instead of Float"),
        (6, torch.ones(5), "q_norm has 5 elements instead of 32"),
        (9, torch.tensor([0, 50]), "position 50 is outside the rotary cache of 50"),
        (10, None, "positions come without a cos_sin_cache"),
        (12, layer.cache[0], r"kv_cache has shape .* instead of \[N,2,Hkv,1,S,D\]"),
        (25, 3, r"q has shape \[2, 325\] for a batch of 3"),
    ):
        arguments = list(layer.fused(layer.cache, apart=False))
        arguments[place] = value
        with pytest.raises((RuntimeError, IndexError), match=message):
            OPS.self_attention(*arguments)
