"""Float64 references, tolerances and inputs that several kernel tests share."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.emulated.kernel_set import set_threads
from tests.e4m3 import kept_as_e4m3

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Half a unit in the last place relative to the value, doubled for the rounding of f32 sums.
RELATIVE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}


def one_dtype_each(cases: Iterable[Any]) -> list[Any]:
    """Pairs of a case and a dtype: the dtypes in turn, and all the other pairs in the wide run."""
    return [
        pytest.param(case, dtype, marks=() if n % 3 == i else pytest.mark.wide)
        for n, case in enumerate(cases)
        for i, dtype in enumerate(DTYPES)
    ]


def assert_near(actual: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    """``actual`` is ``expected`` (float64) rounded to its dtype, but for f32 noise of ``scale``."""
    assert actual.shape == expected.shape
    error = (actual.double() - expected).abs()
    allowed = RELATIVE[actual.dtype] * 1.01 * expected.abs() + 3e-6 * scale
    worst = (error / allowed).max() if error.numel() else torch.zeros(())
    assert bool(worst <= 1), f"worst error is {float(worst):.2f} times what is allowed"


def for_thread_counts(compute: Callable[[], Tensor]) -> Iterator[Tensor]:
    """The results of one computation with one thread and with two."""
    for threads in (1, 2):
        set_threads(threads)
        yield compute()


def attended(scores: Tensor, v: Tensor, seen: Tensor, sinks: Tensor | None) -> Tensor:
    """Weights by scores [Hkv, G, L, L] where ``seen``, and by sinks, of v [Hkv, 1, L, D]."""
    scores, length = scores.masked_fill(~seen, float("-inf")), scores.shape[-1]
    if sinks is not None:
        sink = sinks.double().reshape(*scores.shape[:2], 1, 1)
        scores = torch.cat((scores, sink.expand(-1, -1, length, 1)), dim=-1)
    return scores.softmax(dim=-1)[..., :length] @ v


@dataclass(kw_only=True)
class Attention:
    """One paged cache and the tokens of one request per batch row, to be fed in any chunks."""

    dtype: torch.dtype
    kv_heads: int
    group: int
    head_size: int
    block_size: int
    length: int  # tokens per request
    batch: int = 1
    fill: float = 0.0  # of the cache before anything is written
    sinks: Tensor | None = None
    soft_cap: float | None = None
    slopes: Tensor | None = None
    chunk: int | None = None
    window: int | None = None
    value_size: int | None = None  # where it is not the keys'
    cache_scales: tuple[Tensor, Tensor] | None = None  # of keys and values, in a cache of e4m3
    scale: Tensor = field(init=False)
    cache: Tensor = field(init=False)
    tables: Tensor = field(init=False)
    q: Tensor = field(init=False)
    k: Tensor = field(init=False)
    v: Tensor = field(init=False)

    def __post_init__(self) -> None:
        partitions = -(-self.length // self.block_size)
        blocks = 1 + self.batch * partitions
        shape = (blocks, 2, self.kv_heads, 1, self.block_size, self.head_size)
        self.scale = torch.tensor(self.head_size**-0.5)
        stored = self.dtype if self.cache_scales is None else torch.float8_e4m3fn
        self.cache = torch.full(shape, self.fill, dtype=stored)
        order = torch.randperm(blocks - 1) + 1
        self.tables = order.view(self.batch, partitions).to(torch.int32)
        self.q = self._tokens(self.kv_heads, self.group, self.head_size)
        self.k = self._tokens(self.kv_heads, 1, self.head_size)
        self.v = self._tokens(self.kv_heads, 1, self.value_size or self.head_size)

    @property
    def options(self) -> tuple[object, ...]:
        """Options of a layer, as the causal ops take them."""
        scales = self.cache_scales or (None, None)
        return self.sinks, self.soft_cap, self.slopes, *scales, self.chunk, self.window

    def _tokens(self, heads: int, group: int, size: int) -> Tensor:
        # As the model gives them: [B, L, H, G, D] in memory, seen as [B, H, G, L, D].
        made = torch.randn(self.batch, self.length, heads, group, size)
        return made.to(self.dtype).permute(0, 2, 3, 1, 4)

    def prefill(self, begin: int, end: int, row: int = 0) -> Tensor:
        """Feed tokens [begin, end) of one request; [Hkv, G, end - begin, D]."""
        part = (slice(row, row + 1), slice(None), slice(None), slice(begin, end))
        out: Tensor = torch.ops.rbln_emulated_ops.flash_causal_attention_naive_prefill(
            self.q[part],
            self.k[part],
            self.v[part],
            self.cache,
            self.scale,
            torch.tensor([[begin]], dtype=torch.int32),
            self.tables[row],
            self.scale,
            *self.options,
        )
        return out[0]

    def decode(self, positions: list[int]) -> Tensor:
        """Feed one token of every request, at its own position; [B, Hkv, G, 1, D]."""
        at = [x[:, :, :, positions].diagonal(dim1=0, dim2=3) for x in (self.q, self.k, self.v)]
        q, k, v = (x.permute(3, 0, 1, 2).unsqueeze(3) for x in at)
        starts = torch.tensor(positions, dtype=torch.int32).unsqueeze(1)
        out: Tensor = torch.ops.rbln_emulated_ops.flash_causal_attention_naive_decode(
            q.contiguous(),
            k.contiguous(),
            v.contiguous(),
            self.cache,
            self.scale,
            starts,
            self.tables,
            self.scale,
            *self.options,
        )
        return out

    def expected(self, row: int = 0) -> Tensor:
        """Dense causal attention in float64 over the whole request: [Hkv, G, L, D]."""
        q, k, v = (x[row].double() for x in (self.q, self.k, self.v))
        if self.cache_scales is not None:
            k, v = (
                kept_as_e4m3(x, float(s)) for x, s in zip((k, v), self.cache_scales, strict=True)
            )
        scores = q @ k.transpose(-1, -2) * float(self.scale)
        if self.soft_cap is not None:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        rows = torch.arange(self.length)
        distance = rows[:, None] - rows
        if self.slopes is not None:
            scores -= self.slopes.double().reshape(self.kv_heads, self.group, 1, 1) * distance
        seen = distance >= 0
        if self.chunk is not None:
            seen &= rows[:, None] // self.chunk == rows // self.chunk
        if self.window is not None:
            seen &= distance < self.window
        return attended(scores, v, seen, self.sinks)


def make_attention(case: tuple[int, ...], dtype: torch.dtype, **more: Any) -> Attention:
    """Return one of (KV heads, heads for each of them, head size, block size, length)."""
    names = ("kv_heads", "group", "head_size", "block_size", "length")
    return Attention(dtype=dtype, **dict(zip(names, case, strict=True)), **more)
