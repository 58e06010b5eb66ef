"""Thread that writes audit records, with a bounded queue and a policy for failures.

Records are encoded, written and synchronised in the thread: neither the event loop nor a step waits
for a disk. Invariants (tests/server/audit/test_writer.py): with `stop`, no record is dropped while
the process lives; with `continue`, a `gap` record has the number of those dropped before it. A
record that cannot be made is such a failure as well, and does not end the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

from server.audit.log_files import LogFiles
from server.errors import AuditUnavailableError

logger = logging.getLogger(__name__)

_RETRY_S = 1.0
_SLICE = 256
"""Records between two synchronisations of the disk."""

Record = Callable[[], Mapping[str, Any]]
"""Makes a record in the writer's thread."""


@dataclass(frozen=True, slots=True)
class AuditCounts:
    """State of a log: totals since the start, and gauges.

    `records` and `num_bytes` are written, `dropped` records are not; `failures` counts failed
    writes, `waiting` records. `is_failing` while the last write failed; `seq` and `head` are the
    number of the next record and the hash of the last one.
    """

    records: int
    num_bytes: int
    dropped: int
    failures: int
    waiting: int
    is_failing: bool
    seq: int
    head: str


class AuditWriter:
    """Writes records to `LogFiles` in a thread of its own."""

    def __init__(
        self,
        files: LogFiles,
        header: Record,
        on_full: Literal["stop", "continue"],
        max_waiting: int,
    ) -> None:
        """Start the thread. `header` makes the first record of each file."""
        self._files, self._header = files, header
        self._stops, self._max_waiting = on_full == "stop", max_waiting
        self._waiting: deque[Record] = deque()
        self._changed = threading.Condition()
        self._records = self._num_bytes = self._dropped = self._failures = 0
        # Dropped records that no `gap` record has yet.
        self._gap = 0
        self._is_failing = self._is_closing = self._has_given_up = False
        if files.repaired_bytes:
            self._waiting.append(lambda: _event("repair", removed_bytes=files.repaired_bytes))
        self._thread = threading.Thread(target=self._run, daemon=True, name="audit-log")
        self._thread.start()

    def require_space(self) -> None:
        """Raise `AuditUnavailableError` while the policy `stop` lets no request begin."""
        if not self._stops:
            return
        if self._is_failing:
            raise AuditUnavailableError(
                "The audit log of this server cannot be written, and without it no request is "
                "answered.",
                retry_after_s=_RETRY_S,
            )
        if len(self._waiting) >= self._max_waiting:
            raise AuditUnavailableError(
                f"{len(self._waiting)} records wait for the audit log of this server, whose limit "
                f"is {self._max_waiting} (--audit-queue-records).",
                retry_after_s=_RETRY_S,
            )

    def put(self, record: Record) -> None:
        """Queue a record; with the policy `continue` it is dropped if the queue is full."""
        with self._changed:
            if not self._stops and len(self._waiting) >= self._max_waiting:
                self._drop()
                return
            self._waiting.append(record)
            self._changed.notify()

    def counts(self) -> AuditCounts:
        """Return the state of the log."""
        with self._changed:
            link = self._files.link
            return AuditCounts(
                *(self._records, self._num_bytes, self._dropped, self._failures),
                *(len(self._waiting), self._is_failing, link.seq, link.head),
            )

    def close(self, timeout_s: float) -> None:
        """Write what waits, for at most `timeout_s` seconds, and release the log."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(timeout_s)
        self._has_given_up = True
        if left := len(self._waiting):
            logger.error("audit log: %d records were not written before the end", left)

    def _run(self) -> None:
        while self._wait():
            self._write_slice()
        self._files.close()

    def _wait(self) -> bool:
        """Wait for records; return False at the end."""
        with self._changed:
            while not self._waiting and not self._is_closing:
                # The policy lets no request begin while the log fails, so that none wakes the
                # thread: it tries the disk again.
                if not self._changed.wait(_RETRY_S if self._must_retry() else None):
                    return True
            return bool(self._waiting) and not self._has_given_up

    def _must_retry(self) -> bool:
        return self._stops and self._is_failing

    def _write_slice(self) -> None:
        try:
            for record in [*self._waiting][:_SLICE]:
                self._write(record)
            self._files.sync()
        except OSError as error:
            self._note_failure(str(error))
        except Exception as error:  # noqa: BLE001 (made of what a client sent)
            self._note_failure(f"a record cannot be made: {type(error).__name__}: {error}", lost=1)
        else:
            if self._is_failing:
                logger.warning("audit log: records are written again")
            self._is_failing = False

    def _write(self, record: Record) -> None:
        """Write the first waiting record, after the `gap` record of those dropped before it."""
        if gap := self._gap:
            self._count(self._append(lambda: _event("gap", dropped=gap)))
            with self._changed:
                self._gap -= gap
        written = self._append(record)
        with self._changed:
            self._waiting.popleft()
        self._count(written)

    def _append(self, record: Record) -> int:
        return self._files.append(record(), self._header)

    def _count(self, num_bytes: int) -> None:
        with self._changed:
            self._records += 1
            self._num_bytes += num_bytes

    def _note_failure(self, reason: str, lost: int | None = None) -> None:
        """Count a failure; with `continue`, drop the first `lost` waiting records, or all."""
        if not self._is_failing:
            effect = "requests get 503" if self._stops else "records are dropped"
            logger.error(
                "audit log: %s; until it can be written, %s (--audit-on-full)", reason, effect
            )
        with self._changed:
            self._is_failing = True
            self._failures += 1
            if not self._stops:
                for _ in range(len(self._waiting) if lost is None else lost):
                    self._waiting.popleft()
                    self._drop()
            else:
                self._changed.wait(_RETRY_S)

    def _drop(self) -> None:
        self._dropped += 1
        self._gap += 1


def timestamp(seconds: float | None = None) -> str:
    """Return a time of `time.time`, now by default, in RFC 3339 with microseconds."""
    moment = datetime.fromtimestamp(time.time() if seconds is None else seconds, UTC)
    return moment.isoformat(timespec="microseconds").replace("+00:00", "Z")


def _event(kind: str, **fields: Any) -> Mapping[str, Any]:
    return {"kind": kind, "time": timestamp(), **fields}
