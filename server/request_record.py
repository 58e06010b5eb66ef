"""What is known of a request when it ends; handlers find it in `request.state.record`."""

from __future__ import annotations

from dataclasses import dataclass, field

from starlette.types import Scope

from server.route_table import Route


@dataclass(slots=True)
class RequestRecord:
    """One request from its head to the last byte of its answer.

    `started` is on `time.perf_counter`'s clock. `key` names who asked, None without keys.
    `answer_headers` go with the answer, whatever it is.
    """

    route: Route
    method: str
    started: float
    stream: bool = False
    status: int = 0
    outcome: str | None = None
    key: str | None = None
    answer_headers: dict[str, str] = field(default_factory=dict)

    def final_outcome(self) -> str:
        """Return the outcome that a handler gave, else what the status says."""
        if self.outcome is not None:
            return self.outcome
        if not self.status:
            return "aborted"
        if self.status == 503:
            return "rejected"
        if self.status >= 500:
            return "server_error"
        return "client_error" if self.status >= 400 else "ok"


def record_of(scope: Scope) -> RequestRecord:
    """Return the record that the outermost middleware made."""
    record: RequestRecord = scope["state"]["record"]
    return record
