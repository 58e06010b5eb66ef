"""State of a request from its head to its last byte, in `request.state.record`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.types import Scope

from server.errors import ServerError
from server.request.deadline import Deadline
from server.request.options.draft_options import DraftOptions
from server.request.options.tier import EVERY_TIER, Tier, Tiers
from server.request.route_table import Route
from server.wire.endpoint import JsonObject

if TYPE_CHECKING:
    from opentelemetry.trace import Span

Meter = Callable[[], tuple[int, int]]
"""Returns the prompt and completion tokens that one of the engine's requests has used."""
PredictionMeter = Callable[[], tuple[int, int]]
"""Returns how many tokens of a prediction are in the answer, and how many are not."""
PrefixMeter = Callable[[], tuple[int, int]]
"""Returns how many prompt tokens were read from the prefix cache, and written to it."""


INTERNAL = "internal"
"""Key of the `InternalRequest` in the state of an ASGI scope."""


@dataclass(frozen=True, slots=True)
class InternalRequest:
    """A request that the service sends to itself, for the owner of stored work.

    `tiers` are those that the work may run in; `permitted` work takes a permit of admission, as a
    client's request does. `stamp` are fields that its answer has. `response_id` is the id of the
    response that a request of the Responses API makes.
    """

    owner: str
    tiers: Tiers
    permitted: bool = False
    stamp: JsonObject = field(default_factory=dict)
    response_id: str | None = None


@dataclass(slots=True)
class RequestRecord:
    """One request from its head to the last byte of its answer.

    `started` is on `time.perf_counter`'s clock. `anthropic`: the client expects the forms of
    Anthropic's API. `key` is the name of the API key, None without
    keys; `owner` is the owner of what the request stores; an admin may see more. `internal` is set
    for requests of the service itself. `tiers` are those that the request may run in, and `tier`
    the one that it does, once its body was read.
    `answer_headers` go with the answer, whatever it is. `on_end` is called once its last byte was
    sent, or nothing more will be. `sent_bytes` are those of the answer's body, which is
    `complete` once its last byte was sent. Every request that
    the engine is given for it adds one of `meters`. `failure` is what the engine said of it where
    vLLM's classes do not pass that on. `prefix_meter` is the last one's, as is `prediction_meter`,
    which is there where `drafts` has a prediction that is checked. `guide` is how the answer is
    guided, one of `GUIDES`; `grammars` are the gate's verdicts on its constraints: grammars by job
    key. `sent_frames` counts the frames of a stream; `failure_frames` makes
    those that end it with an error, where the endpoint's depend on what was sent before. `error` is
    how the error looks that ended it. `span` is the request's, None where none is recorded or it
    has ended; `trace_headers` name it to the engine.
    """

    route: Route
    method: str
    started: float
    request_id: str = ""
    anthropic: bool = False
    stream: bool = False
    status: int = 0
    outcome: str | None = None
    key: str | None = None
    owner: str = ""
    is_admin: bool = False
    internal: InternalRequest | None = None
    tiers: Tiers = EVERY_TIER
    tier: Tier | None = None
    answer_headers: dict[str, str] = field(default_factory=dict)
    on_end: list[Callable[[], None]] = field(default_factory=list)
    deadline: Deadline | None = None
    failure: ServerError | None = None
    rejection: str | None = None
    guide: str | None = None
    grammars: Mapping[bytes, str | None] = field(default_factory=dict)
    error: type[ServerError] | None = None
    span: Span | None = None
    trace_headers: Mapping[str, str] | None = None
    sent_bytes: int = 0
    sent_frames: int = 0
    failure_frames: Callable[[ServerError], str] | None = None
    complete: bool = False
    meters: list[Meter] = field(default_factory=list)
    prefix_meter: PrefixMeter | None = None
    drafts: DraftOptions = field(default_factory=DraftOptions)
    prediction_meter: PredictionMeter | None = None

    def tokens(self) -> tuple[int, int]:
        """Return how many prompt and completion tokens the engine has worked on for it."""
        used = [meter() for meter in self.meters]
        return sum(prompt for prompt, _ in used), sum(completion for _, completion in used)

    def prefix_tokens(self) -> tuple[int, int]:
        """Return how many prompt tokens were read from the prefix cache, and written to it."""
        return (0, 0) if self.prefix_meter is None else self.prefix_meter()

    def close_meters(self) -> None:
        """Drop the references to the engine's request states."""
        self.meters.clear()
        self.prefix_meter = self.prediction_meter = None

    def guided_by(self, kind: str) -> None:
        """Set how the answer is guided, unless the request's own constraint has set it."""
        self.guide = self.guide or kind

    def note(self, error: ServerError) -> None:
        """Record the error that ended the request."""
        self.error = type(error)
        self.outcome, self.rejection = error.outcome, error.rejection

    def final_outcome(self) -> str:
        """Return the outcome that a handler set, else the one of the status."""
        if self.outcome is not None:
            return self.outcome
        if not self.status:
            return "aborted"
        if self.status == 503:
            return "rejected"
        if self.status >= 500:
            return "server_error"
        return "client_error" if self.status >= 400 else "ok"


record_var: ContextVar[RequestRecord | None] = ContextVar("record", default=None)
"""Record of the request that the current task serves."""


def record_of(scope: Scope) -> RequestRecord:
    """Return the record that the outermost middleware created."""
    record: RequestRecord = scope["state"]["record"]
    return record
