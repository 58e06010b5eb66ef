"""Sliding-window attention: values, the block it leaves, and bits that nothing else changes."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated import fallback, fallback_attention
from tests.unit.emulator.cases import DTYPES, assert_near, for_thread_counts, one_dtype_each
from tests.unit.emulator.windows import DECODE, NAN, NATIVE, PREFILL, Bodies, Windows

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
# The bodies in PyTorch take milliseconds a step.
DECODE_STEPS = {"native": 100, "aten": 12}


def feed(run: Windows, prompt: int, chunk: int, row: int = 0) -> Tensor:
    """A prompt in padded chunks: [Hkv, G, prompt, D]. Padded rows must give zeros."""
    pieces = []
    for begin in range(0, prompt, chunk):
        end = min(begin + chunk, prompt)
        out = run.prefill(begin, end, row, padded=chunk)
        assert not out[:, :, end - begin :].any()
        pieces.append(out[:, :, : end - begin])
    return torch.cat(pieces, dim=2)


@pytest.mark.parametrize(("case", "dtype"), one_dtype_each(CASES))
def test_prefill_and_decode_equal_a_full_cache(
    case: tuple[int, int, tuple[int, ...], int, int, int], dtype: torch.dtype, bodies: Bodies
) -> None:
    window, chunk, prompts, kv_heads, group, head_size = case
    decode_steps = DECODE_STEPS["native" if bodies is NATIVE else "aten"]
    # Every type meets every combination in some cases.
    options = (CASES.index(case) + DTYPES.index(dtype)) % 4
    heads = {"kv_heads": kv_heads, "group": group, "head_size": head_size}
    sinks = torch.randn(kv_heads * group) * 3 if options % 2 else None
    heads |= {"sinks": sinks, "soft_cap": 1.5 if options // 2 else None}
    sizes = {"window": window, "length": max(prompts) + decode_steps, "batch": len(prompts)}
    run = Windows(bodies=bodies, dtype=dtype, **sizes, **heads)
    expected = [run.expected(row) for row in range(run.batch)]
    for row, prompt in enumerate(prompts):
        assert_near(feed(run, prompt, chunk, row), expected[row][:, :, :prompt])
        assert torch.equal(run.held(prompt, row), run.kept(prompt, row))
    padded = run.batch + 1
    steps = [
        run.decode({row: prompt + step for row, prompt in enumerate(prompts)}, padded)
        for step in range(decode_steps)
    ]
    decoded = torch.cat(steps, dim=3)
    assert not decoded[run.batch :].any()
    for row, prompt in enumerate(prompts):
        end = prompt + decode_steps
        assert_near(decoded[row], expected[row][:, :, prompt:end])
        assert torch.equal(run.held(end, row), run.kept(end, row))
    assert run.cache[0].isnan().all()


@pytest.mark.parametrize(
    ("case", "dtype"), one_dtype_each([(1, 2), (3, 4), (64, 1), (100, 3), (128, 8), (100, 4)])
)
def test_every_chunking_and_decode_give_the_same_bits(
    case: tuple[int, int], dtype: torch.dtype
) -> None:
    (window, group), length = case, 290
    sizes = {"window": window, "length": length, "group": group, "head_size": 64}
    options = {"sinks": torch.randn(2 * group), "soft_cap": 20.0}
    run = Windows(bodies=NATIVE, dtype=dtype, **sizes, **options)
    whole = run.prefill(0, length)
    assert whole.isfinite().all()
    for chunk in (7, 64, 100, 128, 289):
        run.cache.fill_(NAN)
        assert torch.equal(feed(run, length, chunk), whole), chunk
        assert torch.equal(run.held(length), run.kept(length))
    run.cache.fill_(NAN)
    prompt = 40
    # Chunks of one token, then decode steps.
    assert torch.equal(feed(run, prompt, 1), whole[:, :, :prompt])
    for position in range(prompt, length):
        assert torch.equal(run.decode({0: position})[0, :, :, 0], whole[:, :, position]), position


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_the_batch_or_the_threads(dtype: torch.dtype) -> None:
    run = Windows(bodies=NATIVE, window=100, length=300, kv_heads=3, group=4, head_size=64)
    one, two = for_thread_counts(lambda: feed(run, 300, 128))
    assert torch.equal(one, two)
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


def test_a_window_of_thousands_slides(bodies: Bodies) -> None:
    run = Windows(bodies=bodies, window=2048, length=2700, kv_heads=1, group=1)
    feed(run, 2000, 1000)
    steps = [run.decode({0: position}) for position in range(2000, 2060)]
    steps.append(run.prefill(2060, 2690, padded=640)[None, :, :, :630])
    steps += [run.decode({0: position}) for position in range(2690, 2700)]
    assert_near(torch.cat(steps, dim=3)[0], run.expected()[:, :, 2000:])
    assert torch.equal(run.held(2700), run.kept(2700))


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
        *rows,
        run.cache,
        cached,
        cached + torch.tensor(counts).unsqueeze(1),
        run.scale,
        torch.tensor(run.blocks).unsqueeze(1),
        run.scale,
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


# ----------------------------------------------------------------------------------- packed prompts
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


# --------------------------------------------------------------------------------- latent attention
EMULATOR = torch.ops.rbln_emulator
# heads, compressed, rotated, block size, tokens
LATENT_CASES = [
    (4, 48, 16, 16, 50),
    (16, 512, 64, 128, 140),
    (20, 32, 8, 32, 70),
    (1, 7, 2, 16, 33),
]
Case = tuple[int, int, int, int, int]


class Request:
    """One request's tokens, and a cache with room for it."""

    def __init__(self, case: Case, dtype: torch.dtype) -> None:
        heads, self.latent, turned, block_size, self.length = case
        self.q = torch.randn(self.length, heads, self.latent + turned).to(dtype)
        self.kv = torch.randn(self.length, self.latent + turned + 3).to(dtype)
        self.parts = self.kv.split([self.latent, turned, 3], dim=1)
        self.scale = torch.tensor((self.latent + turned) ** -0.5)
        blocks = -(-self.length // block_size)
        shape = (blocks + 1, 1, 1, 1, block_size, self.latent + turned)
        self.cache = torch.full(shape, float("nan"), dtype=dtype)
        self.table = (torch.randperm(blocks) + 1)[None]

    def run(self, begin: int, end: int) -> Tensor:
        """Tokens [begin, end): [end - begin, heads, compressed]."""
        kv_c, k_pe, _ = (part[begin:end] for part in self.parts)
        start = torch.tensor([[begin]], dtype=torch.int32)
        out: Tensor = EMULATOR.latent_attention(
            self.q[begin:end], kv_c, k_pe, self.cache, self.scale, start, self.table, 1
        )
        return out

    def expected(self) -> Tensor:
        """In float64: keys are both parts of a token, values the first alone."""
        keys = torch.cat(self.parts[:2], dim=1).double()
        scores = torch.einsum("thd,sd->hts", self.q.double(), keys) * float(self.scale)
        unseen = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(dim=-1)
        return torch.einsum("hts,sc->thc", weights, self.parts[0].double())


@pytest.mark.parametrize(("case", "dtype"), one_dtype_each(LATENT_CASES))
def test_values_and_every_chunking(case: Case, dtype: torch.dtype) -> None:
    request = Request(case, dtype)
    one, whole = for_thread_counts(lambda: request.run(0, request.length))
    assert torch.equal(one, whole)
    assert_near(whole, request.expected())
    for chunk in (1, 7, 32):
        request.cache.fill_(float("nan"))
        begins = range(0, request.length, chunk)
        parts = [request.run(begin, min(begin + chunk, request.length)) for begin in begins]
        assert torch.equal(torch.cat(parts), whole), chunk


def test_rows_of_a_batch_are_their_own() -> None:
    requests = [Request((16, 512, 64, 16, 40), torch.bfloat16) for _ in range(3)]
    for request in requests:
        request.run(0, 39)
    alone = [request.run(39, 40) for request in requests]
    blocks = requests[0].cache.shape[0]
    tables = torch.cat([r.table + i * blocks for i, r in enumerate(requests)])
    last = [
        torch.cat([x[39:] for x in parts])
        for parts in zip(*((r.q, *r.parts[:2]) for r in requests), strict=True)
    ]
    caches = torch.cat([request.cache for request in requests])
    starts = torch.full((3, 1), 39)
    together = EMULATOR.latent_attention(*last, caches, requests[0].scale, starts, tables, 3)
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("dtype", DTYPES)
def test_each_head_has_a_weight_of_its_own(dtype: torch.dtype) -> None:
    x = torch.randn(37, 5, 90).to(dtype)[..., 10:74]
    weights = torch.randn(5, 33, 64).to(dtype)
    packed = torch.stack([EMULATOR.pack_linear_weight(weight) for weight in weights])
    one, two = for_thread_counts(lambda: EMULATOR.linear_heads(x, packed, 33))
    assert torch.equal(one, two)
    assert_near(one, torch.einsum("thk,hnk->thn", x.double(), weights.double()), scale=8)
    assert torch.equal(EMULATOR.linear_heads(x[20:21], packed, 33), one[20:21])


def test_mistakes_are_named() -> None:
    request = Request((4, 48, 16, 16, 50), torch.float32)
    arguments = [request.q, *request.parts[:2], request.cache, request.scale]
    arguments += [torch.tensor([[0]]), request.table]
    for place, value, message in (
        (1, request.parts[0][:, 1:], "disagree for a batch of 1"),
        (2, request.parts[1].double(), "kv_c or k_pe has dtype Double"),
        (3, request.cache.expand(-1, 2, -1, -1, -1, -1), r"instead of \[N,1,1,1,S,C\+R\]"),
    ):
        wrong = [*arguments]
        wrong[place] = value
        with pytest.raises(RuntimeError, match=message):
            EMULATOR.latent_attention(*wrong, 1)
    packed = EMULATOR.pack_linear_weight(torch.randn(8, 9)).expand(4, -1, -1, -1).contiguous()
    with pytest.raises(RuntimeError, match="packed has shape"):
        EMULATOR.linear_heads(request.q, packed, 8)
