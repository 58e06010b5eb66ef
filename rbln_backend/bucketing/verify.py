"""`VerifyTable`: the compiled sizes of decode steps that check drafts, requests by tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.errors import BucketError

Size = tuple[int, int]
"""Size of a decode step: requests, and tokens of each."""


class VerifyTable:
    """Lengths by decode bucket: the tokens that a step can take of each of its requests.

    A length counts a request's latest token and its drafts; length 1 checks no drafts and is not
    in the table. The cost of a step grows with all its tokens: larger buckets have fewer lengths.
    """

    def __init__(
        self, buckets: BucketTable | None, lengths: Sequence[int], max_tokens: int
    ) -> None:
        """`max_tokens` bounds a step over all requests. Raises `BucketError`."""
        if any(length < 2 for length in lengths):
            raise BucketError(f"A step that checks drafts takes 2 tokens or more, got {lengths}")
        self._buckets = buckets
        self._lengths: Mapping[int, tuple[int, ...]] = {
            bucket: tuple(n for n in sorted(lengths) if bucket * n <= max_tokens)
            for bucket in buckets or ()
        }

    def __iter__(self) -> Iterator[Size]:
        return ((bucket, n) for bucket, lengths in self._lengths.items() for n in lengths)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Decode buckets, in requests."""
        return self._buckets.sizes if self._buckets is not None else ()

    def sizes(self, requests: int) -> tuple[Size, ...]:
        """Return the sizes for `requests`, shortest first; none above the largest bucket."""
        if self._buckets is None or requests > self._buckets.largest:
            return ()
        bucket = self._buckets.find(requests)
        return ((bucket, 1), *((bucket, length) for length in self._lengths[bucket]))

    def longest(self, requests: int, room: int) -> int:
        """Return the most tokens per request in a step of `requests`, at most `room`; at least 1.

        A bucket's lengths are compiled: a step of `n` tokens may have to take more of them.
        """
        return max((n for _, n in self.sizes(requests) if n <= room), default=1)

    def find(self, requests: int, tokens: int) -> Size:
        """Return the smallest size for `tokens` of each of `requests`; raises `BucketError`."""
        for size in self.sizes(requests):
            if tokens <= size[1]:
                return size
        raise BucketError(
            f"No step checks {tokens} tokens of each of {requests} requests; sizes are {list(self)}"
        )


NO_DRAFTS = VerifyTable(None, (), 0)
"""Table of an engine without speculation."""


def draft_lengths(configured: Sequence[int] | None, num_drafts: int) -> tuple[int, ...]:
    """Return the lengths for at most `num_drafts` drafts: by default powers of two and the maximum.

    Raises `BucketError` if the configured lengths do not end at `num_drafts` + 1.
    """
    most = num_drafts + 1
    if configured is None:
        return (*(1 << n for n in range(1, most.bit_length()) if 1 << n < most), most)
    if configured[-1] != most:
        raise BucketError(
            f"last verify length {configured[-1]} (verify_lengths={list(configured)}) must be "
            f"num_speculative_tokens and one: {most}"
        )
    return tuple(configured)
