"""Deadline of a request's whole answer: the server's limit, or the client's own."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass

from starlette.datastructures import Headers

from server.errors import DeadlineError, InvalidValueError, describe

HEADER = "X-Request-Timeout-Ms"
_WHOLE_NUMBER = re.compile("0*[1-9][0-9]{0,11}")


@dataclass(frozen=True, slots=True)
class Deadline:
    """`limit_s` seconds after the request's head; `ends_at` is a `time.perf_counter` value.

    `said_by` names the flag or header that set it.
    """

    limit_s: float
    ends_at: float
    said_by: str

    @property
    def remaining_s(self) -> float:
        """Seconds until the end, 0 when it is over."""
        return max(0.0, self.ends_at - time.perf_counter())

    def error(self) -> DeadlineError:
        """Return the client's error for a missed deadline."""
        return DeadlineError(
            f"The answer was not complete after {self.limit_s:g} s, the limit of {self.said_by}.",
            # A retry would take as long.
            headers={"x-should-retry": "false"},
        )


def deadline_of(headers: Headers, started: float, max_request_s: float) -> Deadline | None:
    """Return the deadline of a request that began at `started` (`time.perf_counter`).

    `max_request_s` 0 sets none. Raises `InvalidValueError` for a header that is no positive
    integer.
    """
    wanted = headers.get(HEADER)
    if wanted is None:
        if not max_request_s:
            return None
        return Deadline(max_request_s, started + max_request_s, "--max-request-s")
    if not _WHOLE_NUMBER.fullmatch(wanted):
        raise InvalidValueError(
            f"The header {HEADER} must be a positive integer of at most 12 digits, got "
            f"{describe(wanted)}.",
            param=HEADER,
        )
    limit_s = int(wanted) / 1000
    if max_request_s and max_request_s < limit_s:
        return Deadline(max_request_s, started + max_request_s, "--max-request-s")
    return Deadline(limit_s, started + limit_s, HEADER)
