"""The emulator's kernels against PyTorch's, and both against the machine's limits.

    python -m benchmarks kernels [--threads N] [--only PART] [--dtype float32 bfloat16]

Each row is the best of several passes over operands that are cold in the last-level cache where a
model's would be. "limit" is the larger of bytes over the read bandwidth and FLOPs over the peak of
all cores (`bfloat16_peak`, or float32 FMAs), both measured in the same run. One thread cannot reach
a fraction of 1.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

import rbln_backend.layers.attention_ops  # noqa: F401  defines the attention ops
from benchmarks.runner.machine import Limits, bfloat16_peak, fma_peak, read_bandwidth
from rbln_backend.devices.emulated.kernel_set import load_kernels, set_threads

OPS, ATTENTION = torch.ops.rbln_emulator, torch.ops.rbln_emulated_ops
CACHE_ROOT = Path.home() / ".cache" / "vllm"
_COLD_BYTES = 192 << 20
_SECONDS = 0.4
_BLOCK = 128
# Bits of a value, and values per scale.
_PACKED = {
    "int4": (4, 128),
    "int8": (8, 2048),
    "e4m3": (8, 128),
    "e2m1": (4, 32),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One kernel call: ours, PyTorch's, and the unavoidable work."""

    name: str
    ours: Callable[[], object]
    theirs: Callable[[], object]
    moved: int
    flops: int


def best_seconds(call: Callable[[], object]) -> float:
    """Return the shortest of the calls within the time budget (at least 3)."""
    call()
    best, passes, end = float("inf"), 0, time.perf_counter() + _SECONDS
    while passes < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - begin)
        passes += 1
    return best


def linear_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield one large projection over the rows of decode buckets and prefill chunks."""
    columns, depth = 8192, 2048
    size = columns * depth * dtype.itemsize
    weights = [torch.randn(columns, depth).to(dtype) for _ in range(max(1, _COLD_BYTES // size))]
    packed = [OPS.pack_linear_weight(weight) for weight in weights]
    for rows in (1, 2, 4, 8, 16, 32, 64, 128, 256):
        x = torch.randn(rows, depth).to(dtype)
        ours, theirs = _cycle(packed), _cycle(weights)
        yield Case(
            f"linear M={rows} N={columns} K={depth}",
            lambda x=x, w=ours: OPS.linear(x, next(w), None, columns),  # type: ignore[misc]
            lambda x=x, w=theirs: functional.linear(x, next(w)),  # type: ignore[misc]
            size,
            2 * rows * columns * depth,
        )


def packed_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield the same projection over packed weights; PyTorch's are of ``dtype``."""
    columns, depth = 8192, 2048
    theirs = torch.randn(columns, depth).to(dtype)
    for name, (bits, group) in _PACKED.items():
        scales = _scales(name, (columns // 16, depth // group, 16), dtype)
        shape = (columns // 16, depth * bits // 32, 16)
        size = 4 * math.prod(shape) + scales.nbytes
        words = [_packed_words(name, shape) for _ in range(max(1, _COLD_BYTES // size))]
        for rows in (1, 8, 32, 128):
            x, ours = torch.randn(rows, depth).to(dtype), _cycle(words)
            yield Case(
                f"packed {name} M={rows} N={columns} K={depth}",
                lambda x=x, w=ours, s=scales, n=name: OPS.quantized_linear(  # type: ignore[misc]
                    x, next(w), s, None, None, columns, n
                ),
                lambda x=x: functional.linear(x, theirs),  # type: ignore[misc]
                size,
                2 * rows * columns * depth,
            )


def _packed_words(name: str, shape: tuple[int, ...]) -> Tensor:
    words = torch.randint(-(2**31), 2**31, shape, dtype=torch.int32)
    # e4m3 values of at most 2, hence no NaN.
    return words & 0x3F3F3F3F if name == "e4m3" else words


def _scales(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if name == "e2m1":
        return torch.randint(120, 127, shape, dtype=torch.uint8)
    return torch.rand(shape).to(dtype)


def _cycle(tensors: list[Tensor]) -> Iterator[Tensor]:
    while True:
        yield from tensors


def attention_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield decode and prefill over a paged cache; PyTorch's keys are one dense tensor."""
    for batch, heads, group, size, start, length in (
        (1, 8, 4, 64, 2047, 1),
        (8, 8, 4, 64, 2047, 1),
        (8, 8, 1, 128, 1023, 1),
        (1, 8, 4, 64, 0, 256),
        (1, 8, 4, 64, 1792, 256),
        (1, 8, 4, 128, 768, 256),
    ):
        yield attention_case(dtype, batch, heads, group, size, start, length)


def _new_tokens(
    dtype: torch.dtype, batch: int, heads: int, group: int, size: int, length: int
) -> tuple[Tensor, ...]:
    """Return queries [batch, heads, group, length, size], and keys and values with group 1."""
    return tuple(
        torch.randn(batch, length, heads, n, size).to(dtype).permute(0, 2, 3, 1, 4)
        for n in (group, 1, 1)
    )


def attention_case(
    dtype: torch.dtype, batch: int, heads: int, group: int, size: int, start: int, length: int
) -> Case:
    """Return attention of `length` new tokens after `start` cached ones, for `batch` requests."""
    keys = start + length
    partitions = -(-keys // _BLOCK)
    cache = torch.randn(batch * partitions + 1, 2, heads, 1, _BLOCK, size).to(dtype)
    q, k, v = _new_tokens(dtype, batch, heads, group, size, length)
    tables = (torch.randperm(batch * partitions) + 1).view(batch, partitions).int()
    starts = torch.full((batch, 1), start, dtype=torch.int32)
    scale = torch.tensor(size**-0.5)
    arguments = (q, k, v, cache, scale, starts, tables, scale)
    flat = torch.randn(batch, heads * group, length, size).to(dtype)
    dense = [torch.randn(batch, heads, keys, size).to(dtype) for _ in range(2)]
    mask = torch.ones(length, keys, dtype=torch.bool).tril(start)
    pairs = batch * heads * group * (length * start + length * (length + 1) // 2)
    kind = "decode" if length == 1 else "prefill"
    return Case(
        f"{kind} B={batch} H={heads}x{group} D={size} start={start} L={length}",
        lambda: ATTENTION.flash_causal_attention_naive_decode(*arguments),
        lambda: functional.scaled_dot_product_attention(
            flat, dense[0], dense[1], attn_mask=mask, enable_gqa=True
        ),
        2 * batch * heads * keys * size * dtype.itemsize,
        4 * pairs * size,
    )


def window_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield decode and prefill within a context that is longer than the window."""
    for batch, heads, group, size, window, length in (
        (1, 8, 4, 64, 1024, 1),
        (8, 8, 4, 64, 1024, 1),
        (8, 8, 8, 64, 128, 1),
        (1, 8, 4, 64, 1024, 256),
        (1, 8, 8, 64, 128, 256),
        (1, 4, 2, 256, 512, 256),
    ):
        yield _window_case(dtype, batch, heads, group, size, window, length)


def _window_case(
    dtype: torch.dtype, batch: int, heads: int, group: int, size: int, window: int, length: int
) -> Case:
    keys = window + length
    cache = torch.randn(batch + 1, 2, heads, 1, window, size).to(dtype)
    q, k, v = _new_tokens(dtype, batch, heads, group, size, length)
    tables = (torch.randperm(batch) + 1).int()
    cached = torch.full((batch, 1), window, dtype=torch.int32)
    scale = torch.tensor(size**-0.5)
    arguments = (q, k, v, cache, cached, cached + length, scale, tables, scale)
    flat = torch.randn(batch, heads * group, length, size).to(dtype)
    dense = [torch.randn(batch, heads, keys, size).to(dtype) for _ in range(2)]
    seen = torch.ones(length, keys, dtype=torch.bool).tril(window).triu(1)
    kind = "decode" if length == 1 else "prefill"
    return Case(
        f"window {kind} B={batch} H={heads}x{group} D={size} W={window} L={length}",
        lambda: ATTENTION.sliding_window_attention_naive_decode(*arguments),
        lambda: functional.scaled_dot_product_attention(
            flat, dense[0], dense[1], attn_mask=seen, enable_gqa=True
        ),
        # The block is read and written, shifted by the new tokens.
        4 * batch * heads * window * size * dtype.itemsize,
        4 * batch * heads * group * length * window * size,
    )


def small_cases(dtype: torch.dtype) -> Iterator[Case]:
    """Yield the ops between the products."""
    for rows in (1, 8, 256):
        x, residual = (torch.randn(rows, 2048).to(dtype) for _ in range(2))
        weight, up = torch.randn(2048).to(dtype), torch.randn(rows, 16384).to(dtype)
        cache, positions = torch.randn(4096, 64).to(dtype), torch.arange(rows)
        half = [t.view(rows, 32, 64)[..., :32] for t in (x, residual)]
        cos = cache[positions, None, :32]
        item = dtype.itemsize
        yield Case(
            f"fused_add_rms_norm M={rows} H=2048",
            lambda a=x, b=residual, w=weight: OPS.fused_add_rms_norm(a, b, w, 1e-5),  # type: ignore[misc]
            lambda a=x, b=residual, w=weight: functional.rms_norm(a + b, (2048,), w),  # type: ignore[misc]
            4 * x.numel() * item,
            0,
        )
        yield Case(
            f"silu_and_mul M={rows} I=8192",
            lambda u=up: OPS.activate(u, "silu", True),  # type: ignore[misc]
            lambda u=up: functional.silu(u[:, :8192]) * u[:, 8192:],  # type: ignore[misc]
            up.numel() * item * 3 // 2,
            0,
        )
        yield Case(
            f"rotary M={rows} q 2048, k 2048",
            lambda p=positions, a=x, b=residual, c=cache: OPS.rotary_embedding(
                p, a, b, c, 64, True
            ),  # type: ignore[misc]
            lambda h=half, c=cos: [torch.cat((t * c - t * c, t * c + t * c), -1) for t in h],  # type: ignore[misc]
            4 * x.numel() * item,
            0,
        )


_CASES = (linear_cases, packed_cases, attention_cases, window_cases, small_cases)


def report(case: Case, limits: Limits) -> str:
    """Measure both sides of ``case``; return one line of the table."""
    ours, theirs = best_seconds(case.ours), best_seconds(case.theirs)
    return (
        f"{case.name:42} {ours * 1e3:9.3f} {theirs * 1e3:9.3f} {theirs / ours:7.2f}"
        f" {case.moved / ours / 1e9:8.1f} {case.flops / ours / 1e9:8.1f}"
        f" {limits.seconds(case.moved, case.flops) / ours:7.2f}"
    )


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> int:
    """Measure the limits, then every case, and print the table."""
    parser = argparse.ArgumentParser(description="The kernels against PyTorch and the machine.")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--cache-root", type=Path, default=CACHE_ROOT)
    parser.add_argument("--only", default="", help="measure the cases whose name holds this")
    options = parser.parse_args(argv)
    kernels = load_kernels(options.cache_root, "native")
    threads = torch.get_num_threads()
    plain = Limits(read_bandwidth(_COLD_BYTES), fma_peak(threads))
    narrow = Limits(plain.bytes_per_s, *bfloat16_peak(threads))
    set_threads(options.threads)
    torch.set_num_threads(options.threads)
    print(
        f"{kernels.isa} kernels, {options.threads} threads: reads {plain.bytes_per_s / 1e9:.1f}"
        f" GB/s, FMA {plain.flops_per_s / 1e9:.0f} GFLOP/s"
    )
    if narrow.unit != plain.unit:
        print(f"{narrow.unit} of bfloat16: {narrow.flops_per_s / 1e9:.0f} GFLOP/s")
    columns = ("ours ms", "torch ms", "speedup", "GB/s", "GFLOP/s", "of limit")
    print(f"{'':42} {columns[0]:>9} {columns[1]:>9} {columns[2]:>7}", end="")
    print(f" {columns[3]:>8} {columns[4]:>8} {columns[5]:>7}")
    for name in options.dtype:
        print(name)
        limits = narrow if name == "bfloat16" else plain
        for make in _CASES:
            for case in make(getattr(torch, name)):
                if options.only in case.name:
                    print("  " + report(case, limits), flush=True)

    return 0
