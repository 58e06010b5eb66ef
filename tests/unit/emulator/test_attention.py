"""Attention over the paged cache: values, and bits that no batch, chunk or padding changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated import fallback
from tests.unit.emulator.cases import DTYPES, Attention, assert_near, for_thread_counts

CASES = [
    # kv_heads, group, head_size, block_size, length
    (2, 1, 32, 16, 50),
    (1, 2, 64, 128, 130),
    (3, 3, 80, 32, 70),
    (2, 4, 64, 64, 200),
    (1, 5, 128, 48, 97),
    (1, 6, 7, 16, 33),
    (1, 7, 40, 128, 128),
    (2, 8, 128, 128, 66),
]


def make(case: tuple[int, int, int, int, int], dtype: torch.dtype, **more: object) -> Attention:
    kv_heads, group, head_size, block_size, length = case
    return Attention(
        dtype=dtype,
        kv_heads=kv_heads,
        group=group,
        head_size=head_size,
        block_size=block_size,
        length=length,
        **more,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_one_shot_prefill_equals_float64(
    case: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    run = make(case, dtype)
    assert_near(run.prefill(0, run.length), run.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_every_chunking_and_decode_give_the_same_bits(
    case: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    run = make(case, dtype, fill=float("nan"))
    whole = run.prefill(0, run.length)
    assert whole.isfinite().all()
    cache = run.cache.clone()
    for chunk in (1, 7, 16, 37, 64, run.length - 1):
        run.cache.fill_(float("nan"))
        pieces = [
            run.prefill(begin, min(begin + chunk, run.length))
            for begin in range(0, run.length, chunk)
        ]
        assert torch.equal(torch.cat(pieces, dim=2), whole), chunk
        assert torch.equal(run.cache.nan_to_num(), cache.nan_to_num())
    for position in {0, 1, 15, run.length // 2, run.length - 1}:
        assert torch.equal(run.decode([position])[0, :, :, 0], whole[:, :, position])


def test_rows_after_the_real_tokens_may_hold_nan() -> None:
    run = make((2, 4, 64, 64, 90), torch.bfloat16)
    clean = run.prefill(0, 90)[:, :, :50].clone()
    for tensor in (run.q, run.k, run.v):
        tensor[:, :, :, 50:] = float("nan")
    run.cache.fill_(float("nan"))
    assert torch.equal(run.prefill(0, 90)[:, :, :50], clean)


def test_a_chunk_past_the_table_is_not_written() -> None:
    run = make((2, 2, 32, 16, 32), torch.float32)
    long = make((2, 2, 32, 16, 40), torch.float32)
    for name in ("q", "k", "v"):
        getattr(long, name)[:, :, :, :32] = getattr(run, name)
    whole = run.prefill(0, 32)
    cache = run.cache.clone()
    long.cache, long.tables = run.cache, run.tables
    assert torch.equal(long.prefill(0, 40)[:, :, :32], whole)
    assert torch.equal(run.cache, cache)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    run = make((4, 4, 64, 32, 160), dtype, batch=5)
    for row in range(5):
        one, two = for_thread_counts(lambda row=row: run.prefill(0, 160, row))  # type: ignore[misc]
        assert torch.equal(one, two)
    positions = [159, 3, 64, 31, 150]
    together = run.decode(positions)
    for row, position in enumerate(positions):
        assert_near(together[row, :, :, 0], run.expected(row)[:, :, position])
    one, two = for_thread_counts(lambda: run.decode(positions))
    assert torch.equal(one, together)
    assert torch.equal(two, together)
    run.tables, run.batch = run.tables[1:3], 2
    run.q, run.k, run.v = run.q[1:3], run.k[1:3], run.v[1:3]
    assert torch.equal(run.decode(positions[1:3]), together[1:3])


def test_padded_decode_rows_are_harmless() -> None:
    run = make((2, 4, 64, 32, 70), torch.float32, batch=4)
    for row in range(4):
        run.prefill(0, 70, row)
    positions = [69, 20, 0, 0]
    run.tables[2:] = 0
    run.cache[0] = float("nan")
    clean = run.decode(positions)[:2].clone()
    for tensor in (run.q, run.k, run.v):
        tensor[2:] = float("nan")
    assert torch.equal(run.decode(positions)[:2], clean)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sinks_enter_the_denominator_only(dtype: torch.dtype) -> None:
    run = make((2, 4, 64, 32, 80), dtype, sinks=torch.randn(8) * 3)
    whole = run.prefill(0, 80)
    assert_near(whole, run.expected())
    assert torch.equal(run.decode([79])[0, :, :, 0], whole[:, :, 79])
    assert run.sinks is not None
    run.sinks = run.sinks.view(2, 4).to(dtype).float()
    assert_near(run.prefill(0, 80), run.expected())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("soft_cap", [0.3, 2.0, 50.0])
def test_soft_caps_bend_the_scores(soft_cap: float, dtype: torch.dtype) -> None:
    run = make((2, 3, 64, 32, 80), dtype, soft_cap=soft_cap, sinks=torch.randn(6))
    whole = run.prefill(0, 80)
    assert_near(whole, run.expected())
    assert torch.equal(run.decode([79])[0, :, :, 0], whole[:, :, 79])
    arguments = (run.q, run.k, run.v, run.cache, run.scale, torch.tensor([[0]]), run.tables)
    plain = fallback.BODIES["rbln_emulated_ops"]["flash_causal_attention_naive_prefill"]
    assert_near(plain(*arguments, run.scale, run.sinks, soft_cap)[0], run.expected())


def test_scores_that_a_cap_saturates_and_zero() -> None:
    run = make((1, 2, 64, 32, 50), torch.float32, soft_cap=3.0)
    run.q *= torch.linspace(0, 40, 50)[:, None] ** 2
    assert_near(run.prefill(0, 50), run.expected(), scale=10)


OPTIONS = {
    "slopes": {"slopes": torch.tensor([0.5, 0.0625, 2.0, 0.01, 0.3, 0.007])},
    "chunk": {"chunk": 24},
    "a chunk of many tiles": {"chunk": 150},
    "window": {"window": 90},
    "a chunk and a window": {"chunk": 70, "window": 50},
    "values": {"value_size": 24},
    "all": {"slopes": torch.linspace(0.01, 0.6, 6), "chunk": 70, "value_size": 48, "soft_cap": 4.0},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIONS)
def test_slopes_chunks_and_narrow_values(name: str, dtype: torch.dtype) -> None:
    run = make((2, 3, 64, 32, 200), dtype, fill=float("nan"), **OPTIONS[name])
    whole = run.prefill(0, 200)
    assert_near(whole, run.expected())
    for size in (1, 37, 64):
        run.cache.fill_(float("nan"))
        parts = [run.prefill(a, min(a + size, 200)) for a in range(0, 200, size)]
        assert torch.equal(torch.cat(parts, dim=2), whole), size
    for position in (0, 23, 24, 150, 199):
        assert torch.equal(run.decode([position])[0, :, :, 0], whole[:, :, position])
    arguments = (run.q, run.k, run.v, run.cache, run.scale, torch.tensor([[0]]), run.tables)
    plain = fallback.BODIES["rbln_emulated_ops"]["flash_causal_attention_naive_prefill"]
    assert_near(plain(*arguments, run.scale, *run.options)[0], run.expected())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_layer_reads_what_another_wrote(dtype: torch.dtype) -> None:
    run = make((2, 3, 64, 32, 200), dtype, window=90, sinks=torch.randn(6))
    whole = run.prefill(0, 200)
    cache = run.cache.clone()
    for start, end in ((0, 200), (130, 131), (150, 200)):
        part = run.q[:, :, :, start:end]
        arguments = (run.cache, run.scale, torch.tensor([[start]]), run.tables[0], *run.options)
        read = torch.ops.rbln_emulator.shared_attention(part, *arguments)
        assert torch.equal(read[0], whole[:, :, start:end])
        assert torch.equal(run.cache, cache)


def test_a_chunk_goes_on_where_another_ended_and_one_block_ops_agree() -> None:
    run = make((2, 2, 32, 64, 60), torch.float32)
    whole = run.prefill(0, 60)
    ops = torch.ops.rbln_emulated_ops
    q, k, v = (x[:, :, :, 20:] for x in (run.q, run.k, run.v))
    start = torch.tensor([[20]])
    flash = ops.flash_causal_attention_naive_prefill(
        q, k, v, run.cache, run.scale, start, run.tables[0], run.scale
    )
    assert torch.equal(flash[0], whole[:, :, 20:])
    with pytest.raises(RuntimeError, match="seq_idx has shape"):
        ops.flash_causal_attention_naive_prefill(
            q, k, v, run.cache, run.scale, torch.tensor([[15, 5]]), run.tables[0], run.scale
        )
    for op in (ops.causal_attention_naive_prefill, ops.causal_attention_naive_decode):
        one = op(q, k, v, run.cache, start, run.scale, run.tables, run.scale)
        assert torch.equal(one[0], whole[:, :, 20:])


def test_large_scores_and_a_strided_cache() -> None:
    run = make((2, 4, 64, 32, 90), torch.float32)
    run.q *= 60
    layers = torch.zeros(run.cache.shape[0], 3, *run.cache.shape[1:])
    plain = run.prefill(0, 90)
    assert_near(plain, run.expected(), scale=60)
    run.cache = layers[:, 1]
    assert torch.equal(run.prefill(0, 90), plain)
    assert not layers[:, 0].any()
    assert not layers[:, 2].any()


def attend(run: Attention, start: int, tables: Tensor) -> Tensor:
    part = [x[:, :, :, :1] for x in (run.q, run.k, run.v)]
    result: Tensor = torch.ops.rbln_emulated_ops.flash_causal_attention_naive_decode(
        *part, run.cache, run.scale, torch.tensor([[start]]), tables, run.scale
    )
    return result


def test_blocks_outside_the_cache_are_refused() -> None:
    run = make((1, 1, 32, 16, 40), torch.float32)
    for bad in (-1, 4):
        tables = torch.tensor([[1, bad, 2]])
        attend(run, 15, tables)  # the first block only
        with pytest.raises(IndexError, match=rf"\[0\]\[1\] is {bad}, the cache has 4 blocks"):
            attend(run, 16, tables)
    for start in (-1, 1 << 40, 2**63 - 1):
        # The last would overflow, and no block would be looked at.
        with pytest.raises(RuntimeError, match=rf"seq_idx\[0\] is {start}"):
            attend(run, start, torch.tensor([[9, 9, 9]]))
    nothing = [x[:0] for x in (run.q, run.k, run.v)]
    with pytest.raises(RuntimeError, match=r"block_tables has shape .* for a batch of 0"):
        torch.ops.rbln_emulated_ops.flash_causal_attention_naive_decode(
            *nothing, run.cache, run.scale, torch.zeros(0, 1), run.tables, run.scale
        )
