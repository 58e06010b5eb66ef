"""Sliding-window attention: values, the block it leaves, and bits that nothing else changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated import fallback
from tests.unit.emulator.cases import DTYPES, assert_near, for_thread_counts
from tests.unit.emulator.windows import DECODE, NAN, PREFILL, Bodies, Windows

NATIVE: Bodies = {
    name: getattr(torch.ops.rbln_emulated_ops, name)
    for name in fallback.BODIES["rbln_emulated_ops"]
}
BODIES = {"native": NATIVE, "aten": fallback.BODIES["rbln_emulated_ops"]}
# window, chunk, prompts of a batch, kv_heads, group, head_size
CASES = [
    (1, 1, (1, 2, 5), 2, 1, 32),
    (1, 32, (70,), 1, 4, 64),
    (3, 2, (1, 3, 9), 1, 2, 80),
    (3, 128, (300, 1), 2, 3, 32),
    (64, 32, (200, 31, 64), 2, 4, 64),
    (64, 64, (129, 63), 1, 8, 128),
    (64, 128, (300, 17), 1, 1, 256),
    (100, 33, (7, 99, 100, 101), 3, 2, 40),
    (100, 128, (260, 128), 2, 5, 96),
    (100, 100, (300,), 1, 6, 64),
    (256, 128, (150, 300), 2, 2, 64),
]
DECODE_STEPS = 100


@pytest.fixture(params=BODIES)
def bodies(request: pytest.FixtureRequest) -> Bodies:
    return BODIES[request.param]


def feed(run: Windows, prompt: int, chunk: int, row: int = 0) -> Tensor:
    """A prompt in padded chunks: [Hkv, G, prompt, D]. Padded rows must give zeros."""
    pieces = []
    for begin in range(0, prompt, chunk):
        end = min(begin + chunk, prompt)
        out = run.prefill(begin, end, row, padded=chunk)
        assert not out[:, :, end - begin :].any()
        pieces.append(out[:, :, : end - begin])
    return torch.cat(pieces, dim=2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_prefill_and_decode_equal_a_full_cache(
    case: tuple[int, int, tuple[int, ...], int, int, int], dtype: torch.dtype, bodies: Bodies
) -> None:
    window, chunk, prompts, kv_heads, group, head_size = case
    # Every type meets every combination in some cases.
    options = (CASES.index(case) + DTYPES.index(dtype)) % 4
    run = Windows(
        bodies=bodies,
        dtype=dtype,
        window=window,
        length=max(prompts) + DECODE_STEPS,
        batch=len(prompts),
        kv_heads=kv_heads,
        group=group,
        head_size=head_size,
        sinks=torch.randn(kv_heads * group) * 3 if options % 2 else None,
        soft_cap=1.5 if options // 2 else None,
    )
    expected = [run.expected(row) for row in range(run.batch)]
    for row, prompt in enumerate(prompts):
        assert_near(feed(run, prompt, chunk, row), expected[row][:, :, :prompt])
        assert torch.equal(run.held(prompt, row), run.kept(prompt, row))
    padded = run.batch + 1
    steps = [
        run.decode({row: prompt + step for row, prompt in enumerate(prompts)}, padded)
        for step in range(DECODE_STEPS)
    ]
    decoded = torch.cat(steps, dim=3)
    assert not decoded[run.batch :].any()
    for row, prompt in enumerate(prompts):
        end = prompt + DECODE_STEPS
        assert_near(decoded[row], expected[row][:, :, prompt:end])
        assert torch.equal(run.held(end, row), run.kept(end, row))
    assert run.cache[0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "group"), [(1, 2), (3, 4), (64, 1), (100, 3), (128, 8)])
def test_every_chunking_and_decode_give_the_same_bits(
    window: int, group: int, dtype: torch.dtype
) -> None:
    length = 290
    run = Windows(
        bodies=NATIVE,
        dtype=dtype,
        window=window,
        length=length,
        group=group,
        head_size=64,
        sinks=torch.randn(2 * group),
        soft_cap=20.0,
    )
    whole = run.prefill(0, length)
    assert whole.isfinite().all()
    for chunk in (1, 7, 64, 100, 128, 289):
        run.cache.fill_(NAN)
        assert torch.equal(feed(run, length, chunk), whole), chunk
        assert torch.equal(run.held(length), run.kept(length))
    run.cache.fill_(NAN)
    prompt = 40
    feed(run, prompt, 32)
    for position in range(prompt, length):
        assert torch.equal(run.decode({0: position})[0, :, :, 0], whole[:, :, position]), position


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    prompts = [150, 1, 99, 100, 64]
    run = Windows(
        bodies=NATIVE, dtype=dtype, window=100, length=151, batch=5, kv_heads=4, head_size=128
    )
    for row, prompt in enumerate(prompts):
        feed(run, prompt, 64, row)
    before = run.cache.clone()

    def decode(rows: list[int], padded: int = 0) -> Tensor:
        run.cache.copy_(before)
        return run.decode({row: prompts[row] for row in rows}, padded)

    together = decode([0, 1, 2, 3, 4])
    after = run.cache.clone()
    for out in for_thread_counts(lambda: decode([4, 2, 0, 1, 3], padded=8)):
        assert torch.equal(out[:5], together[[4, 2, 0, 1, 3]])
        assert torch.equal(run.cache.nan_to_num(), after.nan_to_num())
    for row in range(5):
        assert torch.equal(decode([row]), together[row : row + 1])


def test_prefill_does_not_depend_on_the_threads() -> None:
    run = Windows(bodies=NATIVE, window=100, length=300, kv_heads=3, group=4, head_size=64)
    one, two = for_thread_counts(lambda: feed(run, 300, 128))
    assert torch.equal(one, two)


def test_a_window_of_thousands_slides(bodies: Bodies) -> None:
    run = Windows(bodies=bodies, window=4096, length=4700, kv_heads=1, group=1)
    feed(run, 4000, 2000)
    steps = [run.decode({0: position}) for position in range(4000, 4090)]
    steps.append(run.prefill(4090, 4690, padded=640)[None, :, :, :600])
    steps += [run.decode({0: position}) for position in range(4690, 4700)]
    assert_near(torch.cat(steps, dim=3)[0], run.expected()[:, :, 4000:])
    assert torch.equal(run.held(4700), run.kept(4700))


@pytest.mark.parametrize("swapped", [(2, 3, 1, 0, 4, 5), (0, 1, 4, 3, 2, 5)])
def test_a_cache_with_other_strides(swapped: tuple[int, ...], bodies: Bodies) -> None:
    run = Windows(bodies=bodies, dtype=torch.bfloat16, window=20, length=100, head_size=64)
    whole = feed(run, 100, 30)
    order = [swapped.index(d) for d in range(6)]
    run.cache = torch.full_like(run.cache.permute(swapped).contiguous(), NAN).permute(order)
    assert torch.equal(feed(run, 90, 30), whole[:, :, :90])
    step = run.decode({0: 90})[0]
    assert_near(step, run.expected()[:, :, 90:91])
    assert torch.equal(run.held(91), run.kept(91))


def test_several_new_tokens_per_row_of_a_batch(bodies: Bodies) -> None:
    run = Windows(bodies=bodies, window=30, length=60, batch=3)
    before = (20, 45, 0)
    counts = (5, 3, 0)
    for row, prompt in enumerate(before[:2]):
        feed(run, prompt, 32, row)
    cached = torch.tensor(before).unsqueeze(1)
    rows = [torch.stack([x[b, :, :, n : n + 5] for b, n in enumerate(before)]) for x in run.tokens]
    out = bodies[DECODE](
        *(*rows, run.cache, cached, cached + torch.tensor(counts).unsqueeze(1), run.scale),
        *(torch.tensor(run.blocks).unsqueeze(1), run.scale),
    )
    for row, (start, count) in enumerate(zip(before, counts, strict=True)):
        expected = run.expected(row)[:, :, start : start + count]
        assert_near(out[row, :, :, :count], expected)
        assert not out[row, :, :, count:].any()
        assert torch.equal(run.held(start + count, row), run.kept(start + count, row))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_nan_hurts_those_alone_that_see_it(dtype: torch.dtype) -> None:
    run = Windows(bodies=NATIVE, dtype=dtype, window=40, length=200, kv_heads=1, head_size=64)
    clean = feed(run, 200, 20)
    run.tokens[2][0, 0, 0, 100, 3] = NAN
    # A chunk begins when the block's first slot, of the token, is no row's any more.
    for chunk in (20, 200):
        out = feed(run, 200, chunk)
        assert out[:, :, 100:140, 3].isnan().all()
        out[:, :, 100:140, 3] = clean[:, :, 100:140, 3]
        assert torch.equal(out, clean)
    feed(run, 130, 20)
    steps = torch.cat([run.decode({0: at})[0] for at in range(130, 200)], dim=2)
    assert steps[:, :, :10, 3].isnan().all()
    assert torch.equal(steps[:, :, 10:], clean[:, :, 140:])


def test_large_scores(bodies: Bodies) -> None:
    run = Windows(bodies=bodies, window=50, length=120, head_size=64)
    run.tokens = (run.tokens[0] * 60, *run.tokens[1:])
    assert_near(feed(run, 120, 32), run.expected(), scale=60)


@pytest.mark.parametrize(
    ("cached", "end", "block", "error", "message"),
    [
        (-1, 1, 1, RuntimeError, r"cache_seq_len\[0\] is -1"),
        (3, 6, 1, RuntimeError, r"cache_offset\[0\] is 6, 3 more .* but q has 2 rows"),
        (3, 4, 2, IndexError, r"block_tables\[0\] is 2, the cache has 2 blocks"),
        (3, 4, -1, IndexError, r"block_tables\[0\] is -1, the cache has 2 blocks"),
    ],
)
def test_impossible_requests_are_refused(
    cached: int, end: int, block: int, error: type[Exception], message: str, bodies: Bodies
) -> None:
    run = Windows(bodies=bodies, window=8, length=2)
    lengths = (torch.tensor([[cached]]), torch.tensor([[end]]), run.scale, torch.tensor([block]))
    with pytest.raises(error, match=message):
        bodies[PREFILL](*run.tokens, run.cache, *lengths, run.scale)
    assert run.cache.isnan().all()


def test_lengths_whose_difference_overflows() -> None:
    """The kernels count in 64 bits."""
    run = Windows(bodies=NATIVE, window=8, length=2)
    most = 2**63 - 1

    def lengths(cached: int, end: int) -> tuple[Tensor, ...]:
        return torch.tensor([[cached]]), torch.tensor([[end]]), run.scale, torch.tensor([1])

    with pytest.raises(RuntimeError, match=rf"cache_seq_len\[0\] is {most - 2} and cache_offset"):
        NATIVE[PREFILL](*run.tokens, run.cache, *lengths(most - 2, most), run.scale)
    # No new tokens, though the difference in 64 bits is 2.
    assert not NATIVE[PREFILL](
        *run.tokens, run.cache, *lengths(most - 1, -most - 1), run.scale
    ).any()
    assert run.cache.isnan().all()


def test_a_soft_cap_must_be_positive(bodies: Bodies) -> None:
    run = Windows(bodies=bodies, window=8, length=2, soft_cap=0.0)
    with pytest.raises((RuntimeError, ValueError), match=r"logits_soft_cap is 0.*positive"):
        run.prefill(0, 2)
