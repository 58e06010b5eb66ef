"""Attention over caches of e4m3: what they keep, what tokens see of it, and whose bits depend."""

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated import fallback
from tests.e4m3 import rounded_to_e4m3
from tests.unit.emulator.cases import DTYPES, Attention, assert_near, make_attention
from tests.unit.emulator.windows import NAN, NATIVE, Bodies, Windows

SCALES = torch.tensor(0.0625), torch.tensor(0.37)
# kv_heads, group, head_size, block_size, length
CASES = [(2, 1, 32, 16, 50), (1, 6, 20, 48, 97), (2, 4, 64, 64, 200), (1, 16, 128, 128, 130)]


def make(case: tuple[int, int, int, int, int], dtype: torch.dtype, **more: object) -> Attention:
    return make_attention(case, dtype, **{"cache_scales": SCALES, "fill": NAN} | more)


def kept(x: Tensor, bodies: Bodies, scale: float) -> Tensor:
    """Return the cached form of numbers [n, 16] in any dtype, as float32."""
    rows, one = x.view(1, 1, 1, -1, 16), torch.tensor(1.0)
    cache = torch.zeros(2, 2, 1, 1, len(x), 16, dtype=torch.float8_e4m3fn)
    bodies["flash_causal_attention_naive_prefill"](
        rows,
        rows,
        rows,
        cache,
        one,
        torch.tensor([[0]]),
        torch.tensor([1]),
        one,
        None,
        None,
        None,
        torch.tensor(scale),
        torch.tensor(2 * scale),
    )
    halves = cache[1, 1, 0, 0].float()
    assert torch.equal(halves.nan_to_num(), rounded_to_e4m3(x.float() / (2 * scale)).float())
    return cache[1, 0, 0, 0].float()


@pytest.mark.parametrize(
    ("bodies", "scale"),
    [("native", 1.0), ("native", 0.37), ("native", 30.0), ("aten", 0.37)],
    indirect=["bodies"],
)
def test_keeps_the_nearest_number_of_e4m3(scale: float, bodies: Bodies) -> None:
    halves = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    steps = torch.arange(-512, 512, 2**-6) * scale
    finite = halves.view(torch.bfloat16)
    for numbers in (finite[finite.isfinite()], halves.view(torch.float16), steps):
        x = numbers[~numbers.isnan()]
        x = x[: len(x) // 16 * 16].view(-1, 16)
        wanted = rounded_to_e4m3(x.float() / scale).float()
        assert torch.equal(kept(x, bodies, scale), wanted)
        assert wanted.abs().max() == 448


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_nan_stays_one_and_hurts_those_alone_that_see_it(dtype: torch.dtype) -> None:
    run = make(CASES[2], dtype)
    clean = run.prefill(0, 200)
    run.k[:, 0, :, 120] = NAN
    run.v[:, 1, :, 130, 3] = -NAN
    out = run.prefill(0, 200)
    assert torch.equal(out[0, :, :120], clean[0, :, :120])
    assert out[0, :, 120:].isnan().all()
    assert torch.equal(out[1, :, :130], clean[1, :, :130])
    assert out[1, :, 130:, 3].isnan().all()
    assert torch.equal(out[1, :, :, 4:], clean[1, :, :, 4:])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_pages_give_the_same_bits_in_every_chunking(
    case: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    run = make(case, dtype)
    whole = run.prefill(0, run.length)
    assert_near(whole, run.expected(), scale=4)
    for chunk in (1, 7, 64):
        run.cache.fill_(NAN)
        ends = range(0, run.length, chunk)
        parts = [run.prefill(begin, min(begin + chunk, run.length)) for begin in ends]
        assert torch.equal(torch.cat(parts, dim=2), whole), chunk
    for position in (0, 15, run.length - 1):
        assert torch.equal(run.decode([position])[0, :, :, 0], whole[:, :, position])


OPTIONS = {"soft_cap": 4.0, "chunk": 70, "value_size": 48}
OPTIONS |= {"sinks": torch.linspace(-2, 2, 6), "slopes": torch.linspace(0.01, 0.6, 6)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_pages_with_every_option(dtype: torch.dtype, bodies: Bodies) -> None:
    run = make((2, 3, 64, 32, 200), dtype, **OPTIONS)
    arguments = (run.q, run.k, run.v, run.cache, run.scale, torch.tensor([[0]]), run.tables)
    op = bodies["flash_causal_attention_naive_prefill"]
    out = op(*arguments, run.scale, *run.options)[0]
    assert_near(out, run.expected(), scale=4)
    shared = fallback.BODIES["rbln_emulator"]["shared_attention"]
    if bodies is NATIVE:
        shared = torch.ops.rbln_emulator.shared_attention
    whole = make((2, 3, 64, 32, 200), dtype)
    written = op(
        whole.q,
        whole.k,
        whole.v,
        whole.cache,
        whole.scale,
        torch.tensor([[0]]),
        whole.tables,
        whole.scale,
        *whole.options,
    )
    read = shared(
        whole.q, whole.cache, whole.scale, torch.tensor([[0]]), whole.tables, *whole.options
    )
    assert torch.equal(read, written)


def test_requests_do_not_depend_on_their_batch() -> None:
    run = make((2, 4, 64, 32, 160), torch.bfloat16, batch=4)
    for row in range(4):
        run.prefill(0, 160, row)
    positions = [159, 3, 64, 31]
    together = run.decode(positions)
    run.tables, run.batch = run.tables[1:3], 2
    run.q, run.k, run.v = run.q[1:3], run.k[1:3], run.v[1:3]
    assert torch.equal(run.decode(positions[1:3]), together[1:3])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("window", "group", "size"), [(3, 4, 32), (64, 1, 128), (100, 6, 40)])
def test_windows_keep_and_see_the_same(
    window: int, group: int, size: int, dtype: torch.dtype, bodies: Bodies
) -> None:
    length, prompt = 230, 150
    sizes = {"window": window, "group": group, "head_size": size, "length": length}
    run = Windows(bodies=bodies, dtype=dtype, cache_scales=SCALES, **sizes)  # type: ignore[arg-type]
    expected = run.expected()
    whole = run.prefill(0, length)
    assert_near(whole, expected, scale=4)
    run.cache.fill_(NAN)
    parts = [run.prefill(a, min(a + 32, prompt), padded=32) for a in range(0, prompt, 32)]
    parts[-1] = parts[-1][:, :, : prompt - 128]
    chunked = torch.cat(parts, dim=2)
    decoded = torch.cat([run.decode({0: at})[0] for at in range(prompt, length)], dim=2)
    for seen, part in ((chunked, slice(0, prompt)), (decoded, slice(prompt, length))):
        assert_near(seen, expected[:, :, part], scale=4)
        assert bodies is not NATIVE or torch.equal(seen, whole[:, :, part])
    for held, new, scale in zip(run.held(length), run.kept(length), SCALES, strict=True):
        assert torch.equal(held.double(), rounded_to_e4m3(new.float() / scale))


def test_mistakes_are_named() -> None:
    run = make(CASES[0], torch.float32)
    start, one = torch.tensor([[0]]), torch.tensor(1.0)
    arguments = (run.q, run.k, run.v, run.cache, run.scale, start, run.tables, run.scale)
    for scales, message in (
        ({}, "kv_cache has dtype Float8_e4m3fn without k_scale"),
        ({"k_scale": one}, "of k_scale and v_scale there is one alone"),
        ({"k_scale": one, "v_scale": torch.ones(2)}, "v_scale is not a float32 scalar tensor"),
    ):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.rbln_emulated_ops.flash_causal_attention_naive_prefill(*arguments, **scales)
    plain = run.cache.float()
    arguments = (*arguments[:3], plain, *arguments[4:])
    with pytest.raises(RuntimeError, match="kv_cache has dtype Float with k_scale"):
        torch.ops.rbln_emulated_ops.flash_causal_attention_naive_prefill(
            *arguments, k_scale=one, v_scale=one
        )
