"""Counts that limits are checked against: of this process, or shared by several.

Check and change them in one `locked` block, which must not await: no other process counts in it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from server.host.shared_table import ALL, CountField, SharedTable
from server.key_limits.token_bucket import SharedBucket, TokenBucket

_OWNER, _KEY = "owner:", "key:"
_RATES = ("requests", "tokens")


class LimitCounts(Protocol):
    """Permits and requests in flight, in total and by owner, and the buckets of owners."""

    processes: int

    def locked(self) -> AbstractContextManager[None]:
        """Exclude other processes for the length of the block."""
        ...

    def add(self, field: CountField, more: int, name: str = ALL) -> None:
        """Add to the count of this process."""
        ...

    def total(self, field: CountField, name: str = ALL) -> int:
        """Return the count of all processes."""
        ...

    def by_owner(self, field: CountField) -> Mapping[str, int]:
        """Return the counts of all owners."""
        ...

    def by_key(self, field: CountField) -> Mapping[str, int]:
        """Return the counts of all keys by name."""
        ...

    def bucket(self, owner: str, rate: str, limit: int | None, now: float) -> TokenBucket | None:
        """Return the bucket of an owner with this `limit`, which may have changed; or None."""
        ...


def owner_row(owner: str) -> str:
    """Return the name of an owner's counts."""
    return _OWNER + owner


def key_row(key: str) -> str:
    """Return the name of the counts of keys with the name `key`."""
    return _KEY + key


class LocalCounts:
    """The counts of a server with one process."""

    processes = 1

    def __init__(self) -> None:
        self._counts: defaultdict[CountField, Counter[str]] = defaultdict(Counter)
        self._buckets: dict[tuple[str, str], TokenBucket] = {}

    def locked(self) -> AbstractContextManager[None]:
        """Return an empty block: there is no other process."""
        return nullcontext()

    def add(self, field: CountField, more: int, name: str = ALL) -> None:
        """Add to a count."""
        self._counts[field][name] += more

    def total(self, field: CountField, name: str = ALL) -> int:
        """Return a count."""
        return self._counts[field][name]

    def by_owner(self, field: CountField) -> Mapping[str, int]:
        """Return the counts of all owners."""
        return self._named(field, _OWNER)

    def by_key(self, field: CountField) -> Mapping[str, int]:
        """Return the counts of all keys by name."""
        return self._named(field, _KEY)

    def _named(self, field: CountField, prefix: str) -> Mapping[str, int]:
        counts = self._counts[field].items()
        return {k.removeprefix(prefix): v for k, v in counts if k.startswith(prefix)}

    def bucket(self, owner: str, rate: str, limit: int | None, now: float) -> TokenBucket | None:
        """Return the bucket of an owner with this `limit`, which may have changed; or None."""
        if limit is None:
            self._buckets.pop((owner, rate), None)
            return None
        bucket = self._buckets.get((owner, rate))
        if bucket is None:
            bucket = self._buckets[owner, rate] = TokenBucket(limit, now)
        elif bucket.limit != limit:
            bucket.resize(limit, now)
        return bucket


class SharedCounts:
    """The counts of one of several processes, in a table that they share."""

    def __init__(self, table: SharedTable, process: int) -> None:
        self.table = table
        self.process = process
        self.processes = table.processes

    def locked(self) -> AbstractContextManager[None]:
        """Exclude the other processes for the length of the block."""
        return self.table.locked()

    def add(self, field: CountField, more: int, name: str = ALL) -> None:
        """Add to the count of this process."""
        self.table.add(self.process, name, field, more)

    def total(self, field: CountField, name: str = ALL) -> int:
        """Return the count of all processes."""
        return int(self.table.total(name, field))

    def by_owner(self, field: CountField) -> Mapping[str, int]:
        """Return the counts of all owners."""
        return self.table.totals(_OWNER, field)

    def by_key(self, field: CountField) -> Mapping[str, int]:
        """Return the counts of all keys by name."""
        return self.table.totals(_KEY, field)

    def bucket(self, owner: str, rate: str, limit: int | None, now: float) -> TokenBucket | None:
        """Return the bucket of an owner with this `limit`, which may have changed; or None."""
        if limit is None:
            return None
        cells = self.table.shared(owner_row(owner), 3 * _RATES.index(rate), 3)
        with self.locked():
            bucket = SharedBucket(cells, limit, now)
            if bucket.limit != limit:
                bucket.resize(limit, now)
        return bucket
