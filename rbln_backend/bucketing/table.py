"""`BucketTable`: an immutable set of compiled sizes and the look-up a step makes in it.

Invariants (tests/unit/bucketing/test_table.py): sizes are positive, unique and ascending;
`find` returns the smallest size that holds n.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from rbln_backend.bucketing.strategies import decode_batch_buckets
from rbln_backend.config import RblnConfig
from rbln_backend.errors import BucketError

DEFAULT_CHUNK_TOKENS = 256
"""Tokens of the largest chunk unless told otherwise: it keeps the time between tokens short."""

DEFAULT_MAX_NUM_SEQS = 32
"""Requests that run at once unless told otherwise: their buckets compile in seconds."""

MIN_DERIVED_CHUNK = 16
"""Smallest chunk in tokens worth its own graph when the chunks are derived."""

MAX_DERIVED_CHUNKS = 6
"""Chunk sizes, the chunk included, that are derived at most."""


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

    Unless configured they are the chunk and its halves, at most six sizes and none below 16 tokens
    except the chunk itself: no prompt longer than the smallest runs in twice its length.
    Raises `BucketError` when configured sizes do not end at `max_num_batched_tokens`.
    """
    if max_num_batched_tokens < 1:
        raise BucketError(
            f"max_num_batched_tokens must be greater than 0, got {max_num_batched_tokens}"
        )
    configured = config.prefill_chunk_buckets
    if configured is None:
        halves = [max_num_batched_tokens >> n for n in range(1, MAX_DERIVED_CHUNKS)]
        smaller = sorted(size for size in halves if size >= MIN_DERIVED_CHUNK)
        return BucketTable((*smaller, max_num_batched_tokens))
    if configured[-1] != max_num_batched_tokens:
        raise BucketError(
            f"last prefill chunk bucket {configured[-1]} (prefill_chunk_buckets="
            f"{list(configured)}) must equal max_num_batched_tokens {max_num_batched_tokens}"
        )
    return BucketTable(configured)
