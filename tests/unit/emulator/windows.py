"""Requests with one sliding-window block each, fed step by step, and a full-cache reference."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rbln_backend.devices.emulated import fallback
from tests.e4m3 import kept_as_e4m3
from tests.unit.emulator.cases import attended

NAN = float("nan")
PREFILL = "sliding_window_attention_naive_prefill"
DECODE = "sliding_window_attention_naive_decode"
Bodies = Mapping[str, Callable[..., Any]]
OPS = "rbln_emulated_ops"
NATIVE: Bodies = {name: getattr(torch.ops.rbln_emulated_ops, name) for name in fallback.BODIES[OPS]}
BODIES = {"native": NATIVE, "aten": fallback.BODIES[OPS]}


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32).unsqueeze(1)


@dataclass(kw_only=True)
class Windows:
    """Tokens of ``batch`` requests; unused slots, padded rows and the null block hold NaN."""

    bodies: Bodies
    dtype: torch.dtype = torch.float32
    window: int
    length: int  # tokens per request
    batch: int = 1
    kv_heads: int = 2
    group: int = 2
    head_size: int = 32
    sinks: Tensor | None = None
    soft_cap: float | None = None
    cache_scales: tuple[Tensor, Tensor] | None = None  # of keys and values, in a cache of e4m3
    scale: Tensor = field(init=False)
    cache: Tensor = field(init=False)
    blocks: list[int] = field(init=False)
    tokens: tuple[Tensor, Tensor, Tensor] = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.batch + 1, 2, self.kv_heads, 1, self.window, self.head_size)
        self.scale = torch.tensor(self.head_size**-0.5)
        stored = self.dtype if self.cache_scales is None else torch.float8_e4m3fn
        self.cache = torch.full(shape, NAN, dtype=stored)
        self.blocks = (torch.randperm(self.batch) + 1).tolist()
        k, v = self._rows(1), self._rows(1)
        self.tokens = (self._rows(self.group), k, v)

    def _rows(self, group: int) -> Tensor:
        # As the model gives them: [B, L, H, G, D] in memory, seen as [B, H, G, L, D].
        made = torch.randn(self.batch, self.length, self.kv_heads, group, self.head_size)
        return made.to(self.dtype).permute(0, 2, 3, 1, 4)

    def _run(
        self, name: str, rows: list[Tensor], table: Tensor, cached: Tensor, end: Tensor
    ) -> Tensor:
        mask = (None,) if name == DECODE else ()
        out: Tensor = self.bodies[name](
            *rows,
            self.cache,
            cached,
            end,
            self.scale,
            table,
            self.scale,
            *mask,
            self.sinks,
            self.soft_cap,
            None,
            *(self.cache_scales or ()),
        )
        return out

    def prefill(self, begin: int, end: int, row: int = 0, padded: int = 0) -> Tensor:
        """Feed tokens [begin, end) in a chunk of at least ``padded`` rows: [Hkv, G, rows, D]."""
        fill = max(0, padded - (end - begin))
        rows = [
            torch.nn.functional.pad(x[row : row + 1, :, :, begin:end], (0, 0, 0, fill), value=NAN)
            for x in self.tokens
        ]
        table = torch.tensor(self.blocks[row : row + 1], dtype=torch.int32)
        return self._run(PREFILL, rows, table, int32([begin]), int32([end]))[0]

    def decode(self, positions: Mapping[int, int], padded: int = 0) -> Tensor:
        """Feed one token of each request {row: position}, then padding: [B, Hkv, G, 1, D]."""
        fill = max(0, padded - len(positions))
        rows = [
            torch.cat(
                [x[row, :, :, at : at + 1].unsqueeze(0) for row, at in positions.items()]
                + [torch.full_like(x[:1, :, :, :1], NAN)] * fill
            )
            for x in self.tokens
        ]
        cached = list(positions.values())
        table = int32([self.blocks[row] for row in positions] + [0] * fill)
        ends = int32([n + 1 for n in cached] + [0] * fill)
        return self._run(DECODE, rows, table, int32(cached + [0] * fill), ends)

    def expected(self, row: int = 0) -> Tensor:
        """Every position over its last ``window`` tokens, kept in full, in float64."""
        q, k, v = (x[row].double() for x in self.tokens)
        if self.cache_scales is not None:
            k, v = (
                kept_as_e4m3(x, float(s)) for x, s in zip((k, v), self.cache_scales, strict=True)
            )
        scores = q @ k.transpose(-1, -2) * float(self.scale)
        if self.soft_cap is not None:
            scores = self.soft_cap * (scores / self.soft_cap).tanh()
        ones = torch.ones(self.length, self.length, dtype=torch.bool)
        seen = ones.tril() & ~ones.tril(-self.window)
        return attended(scores, v, seen, self.sinks)

    def kept(self, count: int, row: int = 0) -> Tensor:
        """Return the expected first slots of the block after ``count`` tokens: [2, Hkv, n, D]."""
        first = max(0, count - self.window)
        return torch.stack([x[row, :, 0, first:count] for x in self.tokens[1:]])

    def held(self, count: int, row: int = 0) -> Tensor:
        return self.cache[self.blocks[row], :, :, 0, : min(count, self.window)]
