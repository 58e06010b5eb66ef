"""`BucketTable`: an immutable set of compiled sizes and the look-up a step makes in it.

Invariants (tests/unit/bucketing/test_table.py): sizes are positive, unique and ascending;
`find` returns the smallest size that holds n.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from rbln_backend.errors import BucketError

DEFAULT_CHUNK_TOKENS = 256
"""Default tokens of the largest chunk: it keeps the time between tokens short."""

DEFAULT_MAX_NUM_SEQS = 32
"""Default requests that run at once: their buckets compile in seconds."""


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
