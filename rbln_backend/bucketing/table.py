"""`BucketTable`: an immutable set of compiled sizes and the look-up a step makes in it.

Invariants (tests/unit/backend/test_bucketing.py): sizes are positive, unique and ascending;
`find` returns the smallest size that holds n.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from rbln_backend.bucketing.strategies import decode_batch_buckets
from rbln_backend.config import RblnConfig
from rbln_backend.errors import BucketError

MIN_DERIVED_CHUNK = 16
"""Smallest chunk in tokens worth its own graph when the chunks are derived."""

MIN_DERIVED_HALF = 64
"""Smallest half of the chunk, in tokens, worth a graph between the chunk and its quarter."""


@dataclass(frozen=True, slots=True)
class BucketTable:
    """Compiled sizes, ascending. Raises `BucketError` when they are not."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise BucketError("A bucket table needs at least one bucket")
        if self.sizes[0] < 1:
            raise BucketError(f"Buckets must be greater than 0, got {list(self.sizes)}")
        if any(left >= right for left, right in zip(self.sizes, self.sizes[1:], strict=False)):
            raise BucketError(f"Buckets must be unique and ascending, got {list(self.sizes)}")

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def largest(self) -> int:
        """The largest bucket, which is also the largest size that can run."""
        return self.sizes[-1]

    def find(self, n: int) -> int:
        """Return the smallest bucket >= n; `BucketError` if n < 1 or n > the largest."""
        if n < 1 or n > self.sizes[-1]:
            raise BucketError(
                f"No batch bucket found for batch size {n}; buckets are {list(self.sizes)}"
            )
        return self.sizes[bisect_left(self.sizes, n)]


def decode_bucket_table(config: RblnConfig, max_batch_size: int) -> BucketTable:
    """Return the decode buckets, in requests.

    `max_batch_size` is `max_num_seqs` divided by the number of pipeline stages. Raises
    `BucketError` when the configured strategy cannot end at it.
    """
    buckets = decode_batch_buckets(
        config.decode_batch_bucket_strategy,
        max_batch_size,
        min_batch_size=config.decode_batch_bucket_min,
        limit=config.decode_batch_bucket_limit,
        step=config.decode_batch_bucket_step,
        buckets=config.decode_batch_bucket_manual_buckets,
    )
    return BucketTable(buckets)


def prefill_chunk_table(config: RblnConfig, max_num_batched_tokens: int) -> BucketTable:
    """Return the prefill chunk sizes, in tokens; the largest is `max_num_batched_tokens`.

    Unless configured they are the chunk, a half of at least 64 tokens, a quarter and a sixteenth
    of it, none below 16 tokens except the chunk itself. For prompts of 5 to 300 tokens and a chunk
    of 256, 22 % of the computed tokens are padding (31 % without the half).
    Raises `BucketError` when configured sizes do not end at `max_num_batched_tokens`.
    """
    if max_num_batched_tokens < 1:
        raise BucketError(
            f"max_num_batched_tokens must be greater than 0, got {max_num_batched_tokens}"
        )
    configured = config.prefill_chunk_buckets
    if configured is None:
        derived = (max_num_batched_tokens // 16, max_num_batched_tokens // 4)
        smaller = [size for size in derived if size >= MIN_DERIVED_CHUNK]
        if max_num_batched_tokens // 2 >= MIN_DERIVED_HALF:
            smaller.append(max_num_batched_tokens // 2)
        return BucketTable((*smaller, max_num_batched_tokens))
    if configured[-1] != max_num_batched_tokens:
        raise BucketError(
            f"last prefill chunk bucket {configured[-1]} (prefill_chunk_buckets="
            f"{list(configured)}) must equal max_num_batched_tokens {max_num_batched_tokens}"
        )
    return BucketTable(configured)
