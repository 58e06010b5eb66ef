"""`VerifyTable`: the compiled sizes of decode steps that check drafts, requests by tokens."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.errors import BucketError

Size = tuple[int, int]
"""Of a decode step: requests, and tokens of each."""


class VerifyTable:
    """By decode bucket, the tokens that a step can take of each of its requests.

    A length stands for a request's latest token and its drafts: 1 checks none, and is no part of
    the table. What a step costs grows with all its tokens, so that larger buckets have fewer
    lengths.
    """

    def __init__(
        self, buckets: BucketTable | None, lengths: Sequence[int], max_tokens: int
    ) -> None:
        """`max_tokens`: of a whole step, over all requests. Raises `BucketError`."""
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
        """The requests of decode steps."""
        return self._buckets.sizes if self._buckets is not None else ()

    def sizes(self, requests: int) -> tuple[Size, ...]:
        """Those of a step of so many requests, one token of each first; none for too many."""
        if self._buckets is None or requests > self._buckets.largest:
            return ()
        bucket = self._buckets.find(requests)
        return ((bucket, 1), *((bucket, length) for length in self._lengths[bucket]))

    def longest(self, requests: int) -> int:
        """The most tokens that a step of so many requests can take of each."""
        return max((length for _, length in self.sizes(requests)), default=1)

    def find(self, requests: int, tokens: int) -> Size:
        """The smallest size for `tokens` of each of `requests`; raises `BucketError`."""
        for size in self.sizes(requests):
            if tokens <= size[1]:
                return size
        raise BucketError(
            f"No step checks {tokens} tokens of each of {requests} requests; sizes are {list(self)}"
        )


NO_DRAFTS = VerifyTable(None, (), 0)
"""Of an engine without speculation."""


def draft_lengths(configured: Sequence[int] | None, num_drafts: int) -> tuple[int, ...]:
    """Tokens of a request in a step, with at most `num_drafts` drafts: powers of two and all.

    Raises `BucketError` where the configured ones do not end there.
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
