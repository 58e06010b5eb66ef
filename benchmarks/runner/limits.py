"""Least time of a step on this machine: its work over the measured limits.

Only unavoidable work counts: weights, keys and values once, and the model's multiplications.
Padding, activations and other work of an implementation do not.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from benchmarks.runner.machine import fma_peak, pair_peak, read_bandwidth

_BYTES_PER_ELEMENT = 2  # bfloat16


@dataclass(frozen=True, slots=True)
class Limits:
    """Measured limits of all threads of this machine together."""

    bytes_per_s: float
    flops_per_s: float
    unit: str = "FMA"  # "FMA" of float32, or "pairs" of bfloat16

    def seconds(self, moved: int, flops: int) -> float:
        """Return the least time to read `moved` bytes and do `flops` operations."""
        return max(moved / self.bytes_per_s, flops / self.flops_per_s)


@dataclass(frozen=True, slots=True)
class Work:
    """Bytes to read and floating-point operations (a multiply-add is two)."""

    moved: int
    flops: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """Least bytes and FLOPs of the steps of a dense decoder with full attention, in bfloat16.

    `layer_weights` counts the elements of all layers' matrices, `head_weights` those of the LM
    head; embedding rows are too few to count.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    layer_weights: int
    head_weights: int
    key_value_weights: int = 0
    """Elements of one layer's matrices of keys and values; 0 in results that did not count them."""

    @classmethod
    def of(cls, checkpoint: Path) -> Self:
        """Read the shape of a Llama or Mistral checkpoint; raises KeyError if it is another's."""
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        hidden, heads = config["hidden_size"], config["num_attention_heads"]
        kv_heads = config["num_key_value_heads"]
        head_dim = config.get("head_dim") or hidden // heads
        attention = 2 * hidden * heads * head_dim + 2 * hidden * kv_heads * head_dim
        return cls(
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            layer_weights=config["num_hidden_layers"]
            * (attention + 3 * hidden * config["intermediate_size"]),
            head_weights=hidden * config["vocab_size"],
            key_value_weights=2 * hidden * kv_heads * head_dim,
        )

    @property
    def weight_bytes(self) -> int:
        """Return the bytes of weights that every decode step reads."""
        return (self.layer_weights + self.head_weights) * _BYTES_PER_ELEMENT

    def decode_step(self, batch: int, context: float) -> Work:
        """Return the work of one token for each of `batch` requests of `context` tokens each."""
        cached = 2 * self.layers * self.kv_heads * self.head_dim * context
        pairs = self.layers * self.heads * self.head_dim * context
        return Work(
            moved=self.weight_bytes + int(batch * cached) * _BYTES_PER_ELEMENT,
            flops=batch * (2 * (self.layer_weights + self.head_weights) + int(4 * pairs)),
        )

    def prefill(self, tokens: int) -> Work:
        """Return the work of one prompt of `tokens` tokens, its first output token included.

        Of the last layer all tokens need keys and values, and only the last one the rest.
        """
        layer = self.layer_weights // self.layers
        last = tokens * self.key_value_weights + layer - self.key_value_weights
        weights = tokens * (self.layer_weights - layer) + last + self.head_weights
        pairs = (self.layers - 1) * tokens * (tokens + 1) // 2 + tokens
        return Work(
            moved=self.weight_bytes,
            flops=2 * weights + 4 * self.heads * self.head_dim * pairs,
        )


def measure_limits(weight_bytes: int) -> Limits:
    """Measure, in seconds, the bandwidth on a buffer of `weight_bytes` and `bfloat16_peak`."""
    peak, unit = bfloat16_peak(len(os.sched_getaffinity(0)))
    return Limits(read_bandwidth(weight_bytes), peak, unit)


def bfloat16_peak(threads: int) -> tuple[float, str]:
    """Return the peak FLOP/s of bfloat16 weights on `threads` cores, and the unit.

    AVX-512's pairs if available, else float32 FMAs.
    """
    if pairs := pair_peak(threads):
        return pairs, "pairs"
    return fma_peak(threads), "FMA"
