"""Requests that lie one after the other in a batch of one get what each gets by itself."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated import fallback, fallback_attention
from tests.unit.emulator.cases import DTYPES

OPS, ATTENTION = torch.ops.rbln_emulator, torch.ops.rbln_emulated_ops
KV_HEADS, GROUP, SIZE, BLOCK = 2, 3, 32, 8
# Padding rows at the end, a request without rows, one of one, and one that begins in a page.
LENGTH, COUNTS, STARTS = 40, (13, 0, 1, 21), (5, 0, 30, 0)
OPTIONS = {"logits_soft_cap": 4.0}
Attend = Callable[..., Tensor]


class Step:
    """Rows [1, Hkv, G or 1, L, D], caches, and where each request's blocks are."""

    def __init__(self, dtype: torch.dtype, *, window: bool = False, e4m3: bool = False) -> None:
        heads = ((GROUP, dtype), (1, dtype), (1, dtype))
        self.qkv = [torch.randn(1, KV_HEADS, g, LENGTH, SIZE).to(d) for g, d in heads]
        # The content of padding rows must not matter.
        for rows in self.qkv:
            rows[..., sum(COUNTS) :, :] = float("nan")
        self.cache = torch.randn(30, 2, KV_HEADS, 1, BLOCK, SIZE)
        self.cache = self.cache.to(torch.float8_e4m3fn if e4m3 else dtype)
        self.options = dict(OPTIONS, sinks=torch.randn(KV_HEADS * GROUP))
        self.options["alibi_slopes"] = torch.rand(KV_HEADS * GROUP)
        if e4m3:
            self.options |= {"k_scale": torch.tensor(0.02), "v_scale": torch.tensor(1.5)}
        self.counts = torch.tensor(COUNTS, dtype=torch.int32)
        self.scale = torch.tensor(SIZE**-0.5)
        cached = torch.tensor(STARTS)
        self.starts, self.ends = cached[:, None], (cached + self.counts)[:, None]
        blocks = torch.randperm(29)[: len(COUNTS) * (1 if window else 5)] + 1
        self.tables = blocks.view(len(COUNTS), -1)

    def alone(self, attend: Callable[[list[Tensor], int], Tensor]) -> Tensor:
        """``attend(rows, request)`` request by request, and zeros for the rest."""
        out, first = torch.zeros_like(self.qkv[0]), 0
        for request, count in enumerate(COUNTS):
            rows = slice(first, first + count)
            if count:
                own = [x[..., rows, :] for x in self.qkv]
                out[..., rows, :] = attend(own, request)
            first += count
        return out


def causal(step: Step, op: Attend, cache: Tensor, rows: list[Tensor], *at: Tensor) -> Tensor:
    starts, tables = at[:2]
    more = {"query_counts": at[2]} if len(at) > 2 else {}
    bounds = {"attention_window": 9}
    required = (*rows, cache, step.scale, starts, tables, step.scale)
    return op(*required, **step.options, **bounds, **more)


def shared(step: Step, op: Attend, cache: Tensor, rows: list[Tensor], *at: Tensor) -> Tensor:
    more = {"query_counts": at[2]} if len(at) > 2 else {}
    return op(rows[0], cache, step.scale, *at[:2], **step.options, **more)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_causal_attention(dtype: torch.dtype, e4m3: bool) -> None:
    step = Step(dtype, e4m3=e4m3)
    flash = ATTENTION.flash_causal_attention_naive_prefill
    bodies = fallback_attention.flash_causal_attention, fallback_attention.shared_attention
    for call, op, body in ((causal, flash, bodies[0]), (shared, OPS.shared_attention, bodies[1])):
        caches = [step.cache.clone() for _ in range(3)]
        expected = step.alone(
            lambda rows, r, call=call, op=op, cache=caches[0]: call(
                step, op, cache, rows, step.starts[r], step.tables[r]
            )
        )
        for cache, packed in ((caches[1], op), (caches[2], body)):
            at = (step.starts, step.tables, step.counts)
            actual = call(step, packed, cache, step.qkv, *at)
            assert not actual[..., sum(COUNTS) :, :].any()
            if packed is op:
                assert torch.equal(actual, expected)
                assert torch.equal(cache.float(), caches[0].float())
            else:
                close(actual, expected, dtype)
                close(cache.float(), caches[0].float(), dtype)


@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_windows(dtype: torch.dtype, e4m3: bool) -> None:
    step = Step(dtype, window=True, e4m3=e4m3)
    op = ATTENTION.sliding_window_attention_naive_prefill
    caches = [step.cache.clone() for _ in range(3)]

    def call(attend: Attend, cache: Tensor, rows: list[Tensor], *at: Tensor, **more: Tensor):
        starts, ends, tables = at
        lengths = (starts, ends, step.scale, tables, step.scale)
        return attend(*rows, cache, *lengths, **step.options, **more)

    expected = step.alone(
        lambda rows, r: call(op, caches[0], rows, step.starts[r], step.ends[r], step.tables[r])
    )
    at = (step.starts, step.ends, step.tables.flatten())
    body = fallback_attention.sliding_window_prefill
    actual, plain = (
        call(attend, cache, step.qkv, *at, query_counts=step.counts)
        for attend, cache in ((op, caches[1]), (body, caches[2]))
    )
    assert torch.equal(actual, expected)
    assert torch.equal(caches[1].float(), caches[0].float())
    close(plain, expected, dtype)
    close(caches[2].float(), caches[0].float(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_latent_attention(dtype: torch.dtype) -> None:
    heads, latent, turned, total = 5, 24, 8, sum(COUNTS)
    q = torch.randn(LENGTH, heads, latent + turned).to(dtype)
    kv_c, k_pe = torch.randn(LENGTH, latent).to(dtype), torch.randn(LENGTH, turned).to(dtype)
    caches = [torch.randn(30, 1, 1, 1, BLOCK, latent + turned).to(dtype)]
    caches += [caches[0].clone(), caches[0].clone()]
    step = Step(dtype)
    expected, first = torch.zeros(LENGTH, heads, latent, dtype=dtype), 0
    for request, count in enumerate(COUNTS):
        rows = slice(first, first + count)
        if count:
            own = (q[rows], kv_c[rows], k_pe[rows], caches[0], step.scale)
            at = (step.starts[request], step.tables[request])
            expected[rows] = OPS.latent_attention(*own, *at, 1)
        first += count
    together = (step.scale, step.starts, step.tables, 1, step.counts)
    actual = OPS.latent_attention(q, kv_c, k_pe, caches[1], *together)
    assert torch.equal(actual, expected)
    assert torch.equal(caches[1], caches[0])
    plain = fallback_attention.latent_attention(q, kv_c, k_pe, caches[2], *together)
    close(plain[:total], expected[:total], dtype)


@pytest.mark.parametrize("window", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_fused_layer(dtype: torch.dtype, window: bool) -> None:
    step = Step(dtype, window=window)
    rows = [x[0].permute(2, 0, 1, 3).reshape(LENGTH, -1) for x in step.qkv]
    parts = [item for row in rows for item in (row, 0)]
    rest = (None, None, 1e-6, None, None, True)
    options = (step.options["sinks"], 4.0, step.options["alibi_slopes"], None, None)
    bounds = (None, None) if window else (None, 9)
    at = (step.starts, step.ends if window else None, step.tables)
    tail = (*at, *options, *bounds, GROUP, 1, step.counts)
    caches = [step.cache.clone() for _ in range(3)]
    if window:
        expected = ATTENTION.sliding_window_attention_naive_prefill(
            *step.qkv, caches[0], step.starts, step.ends, step.scale, step.tables.flatten(),
            step.scale, **step.options, query_counts=step.counts,
        )  # fmt: skip
    else:
        flash = ATTENTION.flash_causal_attention_naive_prefill
        packed = (step.starts, step.tables, step.counts)
        expected = causal(step, flash, caches[0], step.qkv, *packed)
    expected = expected.permute(0, 3, 1, 2, 4).reshape(LENGTH, -1)
    actual = OPS.self_attention(*parts, *rest, caches[1], step.scale, *tail)
    assert torch.equal(actual, expected)
    assert torch.equal(caches[1], caches[0])
    plain = fallback.self_attention(*parts, *rest, caches[2], step.scale, *tail)
    close(plain, expected, dtype)


def test_more_rows_than_there_are_is_refused() -> None:
    step = Step(torch.float32)
    flash = ATTENTION.flash_causal_attention_naive_prefill
    most = 2**63 - 1
    for counts, reason in (
        ((40, 0, 1, 0), "41 rows, q 40"),
        ((-1, 0, 1, 0), "has -1"),
        ((1, most, most, 3), f"{1 + most} rows, q 40"),
    ):
        at = (step.starts, step.tables, torch.tensor(counts))
        with pytest.raises(RuntimeError, match=reason):
            causal(step, flash, step.cache, step.qkv, *at)
    with pytest.raises(RuntimeError, match="a batch of one, not of 2"):
        two = [x.expand(2, -1, -1, -1, -1) for x in step.qkv]
        causal(step, flash, step.cache, two, step.starts, step.tables, step.counts)


def close(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    torch.testing.assert_close(actual, expected, rtol=4 * step, atol=8 * step)
