"""Attention over the paged cache: values, and bits that no batch, chunk or padding changes."""

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, fx

from rbln_backend.devices.emulated import fallback
from rbln_backend.errors import UnsupportedModelError
from rbln_backend.layers.attention_ops import AttentionOptions, EmulatedAttention
from tests.unit.emulator.cases import (
    DTYPES,
    Attention,
    assert_near,
    for_thread_counts,
    make_attention,
    one_dtype_each,
)

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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_every_chunking_and_decode_give_the_same_bits(
    case: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    run = make_attention(case, dtype, fill=float("nan"))
    whole = run.prefill(0, run.length)
    assert_near(whole, run.expected())
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
    run = make_attention((2, 4, 64, 64, 90), torch.bfloat16)
    clean = run.prefill(0, 90)[:, :, :50].clone()
    for tensor in (run.q, run.k, run.v):
        tensor[:, :, :, 50:] = float("nan")
    run.cache.fill_(float("nan"))
    assert torch.equal(run.prefill(0, 90)[:, :, :50], clean)


def test_a_chunk_past_the_table_is_not_written() -> None:
    run = make_attention((2, 2, 32, 16, 32), torch.float32)
    long = make_attention((2, 2, 32, 16, 40), torch.float32)
    for name in ("q", "k", "v"):
        getattr(long, name)[:, :, :, :32] = getattr(run, name)
    whole = run.prefill(0, 32)
    cache = run.cache.clone()
    long.cache, long.tables = run.cache, run.tables
    assert torch.equal(long.prefill(0, 40)[:, :, :32], whole)
    assert torch.equal(run.cache, cache)


@pytest.mark.parametrize("dtype", DTYPES)
def test_decode_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    run = make_attention((4, 4, 64, 32, 160), dtype, batch=5)
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
    run = make_attention((2, 4, 64, 32, 70), torch.float32, batch=4)
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
    run = make_attention((2, 4, 64, 32, 80), dtype, sinks=torch.randn(8) * 3)
    whole = run.prefill(0, 80)
    assert_near(whole, run.expected())
    assert torch.equal(run.decode([79])[0, :, :, 0], whole[:, :, 79])
    assert run.sinks is not None
    run.sinks = run.sinks.view(2, 4).to(dtype).float()
    assert_near(run.prefill(0, 80), run.expected())


@pytest.mark.parametrize(("soft_cap", "dtype"), one_dtype_each([0.3, 2.0, 50.0]))
def test_soft_caps_bend_the_scores(soft_cap: float, dtype: torch.dtype) -> None:
    run = make_attention((2, 3, 64, 32, 80), dtype, soft_cap=soft_cap, sinks=torch.randn(6))
    whole = run.prefill(0, 80)
    assert_near(whole, run.expected())
    assert torch.equal(run.decode([79])[0, :, :, 0], whole[:, :, 79])
    arguments = (run.q, run.k, run.v, run.cache, run.scale, torch.tensor([[0]]), run.tables)
    plain = fallback.BODIES["rbln_emulated_ops"]["flash_causal_attention_naive_prefill"]
    assert_near(plain(*arguments, run.scale, run.sinks, soft_cap)[0], run.expected())


def test_scores_that_a_cap_saturates_and_zero() -> None:
    run = make_attention((1, 2, 64, 32, 50), torch.float32, soft_cap=3.0)
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


@pytest.mark.parametrize(("name", "dtype"), one_dtype_each(OPTIONS))
def test_slopes_chunks_and_narrow_values(name: str, dtype: torch.dtype) -> None:
    run = make_attention((2, 3, 64, 32, 200), dtype, fill=float("nan"), **OPTIONS[name])
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
    run = make_attention((2, 3, 64, 32, 200), dtype, window=90, sinks=torch.randn(6))
    whole = run.prefill(0, 200)
    cache = run.cache.clone()
    for start, end in ((0, 200), (130, 131), (150, 200)):
        part = run.q[:, :, :, start:end]
        arguments = (run.cache, run.scale, torch.tensor([[start]]), run.tables[0], *run.options)
        read = torch.ops.rbln_emulator.shared_attention(part, *arguments)
        assert torch.equal(read[0], whole[:, :, start:end])
        assert torch.equal(run.cache, cache)


def test_a_chunk_goes_on_where_another_ended_and_one_block_ops_agree() -> None:
    run = make_attention((2, 2, 32, 64, 60), torch.float32)
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
    run = make_attention((2, 4, 64, 32, 90), torch.float32)
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
    run = make_attention((1, 1, 32, 16, 40), torch.float32)
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


# ---------------------------------------------------------------------------------- attention calls
LENGTH, KV_HEADS, GROUP, HEAD_SIZE, BLOCK = 6, 2, 2, 32, 16
START = torch.tensor([[0]], dtype=torch.int32)
END = torch.tensor([[LENGTH]], dtype=torch.int32)


@dataclass(frozen=True)
class Case:
    kind: str
    """The method that is called."""
    form: dict[str, bool]
    op: str
    documented: list[str]
    """The op's arguments, by the names that the layers use."""
    before_sinks: list[str | None]
    """What stands between those and the sinks."""


ONE_BLOCK = ["q", "k", "v", "kv_cache", "seq_idx", "scale", "block_tables", "scale"]
FLASH = ["q", "k", "v", "kv_cache", "scale", "seq_idx", "block_tables", "scale"]
WINDOW = [*"q k v kv_cache cache_seq_len cache_offset scale block_tables scale".split()]
CALL_CASES = [
    Case(kind, {"is_prefill": phase == "prefill", **form}, f"{op}_naive_{phase}", names, [])
    for kind, form, op, names in (
        ("causal", {"one_block": True}, "causal_attention", ONE_BLOCK),
        ("causal", {"one_block": False}, "flash_causal_attention", FLASH),
        ("shifted_window", {}, "sliding_window_attention", WINDOW),
    )
    for phase in ("prefill", "decode")
]
CALL_CASES[-1].before_sinks.append(None)  # for the decode mask
every_case = pytest.mark.parametrize("case", CALL_CASES, ids=lambda case: case.op)


def tensors(case: Case) -> dict[str, Tensor]:
    q, k, v = (torch.randn(1, KV_HEADS, n, LENGTH, HEAD_SIZE) for n in (GROUP, 1, 1))
    made = {"q": q, "k": k, "v": v, "scale": torch.tensor(0.2), "seq_idx": START}
    made |= {"cache_seq_len": START, "cache_offset": END}
    made |= {"kv_cache": torch.zeros(3, 2, KV_HEADS, 1, BLOCK, HEAD_SIZE)}
    made |= {"block_tables": torch.tensor([2], dtype=torch.int32)}
    return {name: made[name] for name in case.documented}


def call(
    case: Case, arguments: Mapping[str, object], *, custom: bool = False, **options: object
) -> Tensor:
    """The op's result; ``options`` are those of a layer."""
    attention = EmulatedAttention(
        AttentionOptions(**options),  # type: ignore[arg-type]
        use_custom_kernel=custom,
    )
    method = getattr(attention, case.kind)
    result: Tensor = method(**arguments, **case.form)
    return result


def traced(case: Case, *, custom: bool = False, sinks: bool = False, **more: object) -> fx.Node:
    """The call that a compiler sees; tensors carry the names of the layer's arguments."""
    tracer = fx.Tracer()
    tracer.graph = fx.Graph()
    names = [*dict.fromkeys(case.documented), *(["sinks"] if sinks else [])]
    proxies = {name: tracer.create_proxy("placeholder", name, (), {}) for name in names}
    result: object = call(
        case,
        {name: proxies[name] for name in case.documented},
        custom=custom,
        sinks=proxies.get("sinks"),
        **more,
    )
    assert isinstance(result, fx.Proxy)
    return result.node


def names_of(node: fx.Node) -> list[str | None]:
    return [None if a is None else str(a) for a in node.args]


@every_case
@pytest.mark.parametrize("custom", [False, True])
def test_a_call_without_options_is_the_documented_one(case: Case, custom: bool) -> None:
    node = traced(case, custom=custom)
    assert (
        str(node.target)
        == f"{'rbln_emulated_kernels' if custom else 'rbln_emulated_ops'}.{case.op}"
    )
    assert names_of(node) == case.documented
    assert not node.kwargs


@every_case
def test_sinks_go_by_position_and_caps_by_name(case: Case) -> None:
    node = traced(case, sinks=True, soft_cap=0.5)
    assert names_of(node) == [*case.documented, *case.before_sinks, "sinks"]
    assert node.kwargs == {"logits_soft_cap": 0.5}
    assert names_of(traced(case, soft_cap=0.5)) == case.documented


@every_case
def test_options_reach_the_kernels(case: Case) -> None:
    arguments, sinks = tensors(case), torch.randn(KV_HEADS * GROUP)
    plain, sunk, capped, both = (
        call(case, arguments, **more)
        for more in ({}, {"sinks": sinks}, {"soft_cap": 0.5}, {"sinks": sinks, "soft_cap": 0.5})
    )
    for one, other in ((plain, sunk), (plain, capped), (sunk, both), (capped, both)):
        assert not torch.allclose(one, other)


@every_case
def test_the_custom_kernels_keep_keys_and_values_outermost(case: Case) -> None:
    arguments = tensors(case)
    plain = call(case, arguments)
    swapped = {**arguments, "kv_cache": torch.zeros(2, 3, KV_HEADS, 1, BLOCK, HEAD_SIZE)}
    custom = call(case, swapped, custom=True)
    assert torch.equal(custom, plain)
    assert torch.equal(swapped["kv_cache"].transpose(0, 1), arguments["kv_cache"])
    assert arguments["kv_cache"][2].any()


@every_case
def test_the_custom_kernels_refuse_what_they_lack(case: Case) -> None:
    with pytest.raises(UnsupportedModelError, match="take no sinks"):
        traced(case, custom=True, sinks=True)
    with pytest.raises(UnsupportedModelError, match="take no logits_soft_cap"):
        traced(case, custom=True, soft_cap=30.0)


# ----------------------------------------------------------------------------------- self attention
OPS, ATTENTION = torch.ops.rbln_emulator, torch.ops.rbln_emulated_ops
FUSED_KV_HEADS, FUSED_GROUP, FUSED_SIZE, BLOCK_SIZE = 2, 3, 32, 16
HEADS = (FUSED_KV_HEADS * FUSED_GROUP, FUSED_KV_HEADS, FUSED_KV_HEADS)
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
        self.qkv = torch.randn(tokens, sum(HEADS) * FUSED_SIZE + 5).to(dtype)
        self.norms = [torch.randn(FUSED_SIZE).to(dtype) if self.normed else None for _ in "qk"]
        self.positions = torch.arange(tokens) % 50 if self.rotated else None
        self.rotary = torch.randn(50, FUSED_SIZE - 8).to(dtype)
        shape = (1 + 4 * self.batch, 2, FUSED_KV_HEADS, 1, BLOCK_SIZE, FUSED_SIZE)
        self.cache = torch.randn(shape).to(torch.float8_e4m3fn if self.e4m3 else dtype)
        scales = (torch.tensor(0.02), torch.tensor(1.5)) if self.e4m3 else (None, None)
        self.cache_scales = scales
        self.scale = torch.tensor(FUSED_SIZE**-0.5)
        self.starts = torch.arange(3, 3 + self.batch, dtype=torch.int32).unsqueeze(1)
        self.ends = self.starts + self.length if self.window else None
        pages = torch.randperm(4 * self.batch) + 1
        self.tables = (pages[: self.batch] if self.window else pages).view(self.batch, -1)
        self.sinks = torch.randn(FUSED_KV_HEADS * FUSED_GROUP)
        self.slopes = torch.rand(FUSED_KV_HEADS * FUSED_GROUP)

    @property
    def rows(self) -> list[Tensor]:
        return list(self.qkv.split([*(h * FUSED_SIZE for h in HEADS), 5], dim=-1))[:3]

    def fused(self, cache: Tensor, *, apart: bool) -> tuple[object, ...]:
        """The arguments of the fused op, with q, k and v as one tensor or as three."""
        columns = [0, HEADS[0] * FUSED_SIZE, (HEADS[0] + HEADS[1]) * FUSED_SIZE]
        parts = [(x, 0) for x in self.rows] if apart else [(self.qkv, c) for c in columns]
        return (
            *(item for part in parts for item in part),
            *self.norms,
            EPS,
            self.positions,
            self.rotary if self.rotated else None,
            True,
            cache,
            self.scale,
            self.starts,
            self.ends,
            self.tables,
            self.sinks,
            5.0,
            self.slopes,
            *self.cache_scales,
            *((None, None) if self.window else (7, 20)),
            FUSED_GROUP,
            self.batch,
        )

    def one_by_one(self, cache: Tensor) -> Tensor:
        rows = [x.contiguous() for x in self.rows]
        for i, norm in enumerate(self.norms):
            if norm is not None:
                heads = rows[i].view(-1, FUSED_SIZE)
                rows[i] = OPS.rms_norm(heads, norm, EPS).view(rows[i].shape)
        if self.positions is not None:
            rows[:2] = OPS.rotary_embedding(
                self.positions, *rows[:2], self.rotary, FUSED_SIZE, True
            )
        heads = [
            x.view(self.batch, self.length, FUSED_KV_HEADS, -1, FUSED_SIZE).permute(0, 2, 3, 1, 4)
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


FUSED_CASES = [
    {"batch": 1, "length": 20, "window": False},
    {"batch": 5, "length": 1, "window": False, "normed": False},
    {"batch": 1, "length": 9, "window": True, "rotated": False},
    {"batch": 4, "length": 1, "window": True},
    {"batch": 3, "length": 2, "window": False, "normed": False, "rotated": False},
    {"batch": 2, "length": 7, "window": False, "normed": False, "rotated": False, "e4m3": True},
    {"batch": 3, "length": 2, "window": True, "normed": False, "rotated": False, "e4m3": True},
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", FUSED_CASES)
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


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.wide), torch.bfloat16]
)
@pytest.mark.parametrize("case", FUSED_CASES[:3])
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
