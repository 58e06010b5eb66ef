"""State of a request from its head to its last byte, in `request.state.record`."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from starlette.datastructures import Headers
from starlette.types import Scope

from server.admission import NO_LIMITS, KeyLimits, KeyUse
from server.errors import DeadlineError, InvalidValueError, RateLimitError, ServerError, describe
from server.request.endpoints import Route
from server.request.options import EVERY_TIER, DraftOptions, Tier, Tiers
from server.wire import DirectFrames, JsonObject, PromptProgress

if TYPE_CHECKING:
    from opentelemetry.trace import Span


Counts = Callable[[], tuple[int, int]]
"""Returns two numbers of tokens."""


INTERNAL = "internal"
"""Key of the `InternalRequest` in the state of an ASGI scope."""


@dataclass(frozen=True, slots=True)
class InternalRequest:
    """A request that the service sends to itself, for the owner of stored work.

    `tiers` are those that the work may run in; `permitted` work takes a permit of admission, as a
    client's request does. `extra_fields` are in its answer. `response_id` is the id of the response
    that a request of the Responses API makes.
    """

    owner: str
    tiers: Tiers
    permitted: bool = False
    extra_fields: JsonObject = field(default_factory=dict)
    response_id: str | None = None


@dataclass(frozen=True, slots=True)
class Caller:
    """The authenticated caller of a request.

    `key` is the key's name or None; `owner` is the owner of the data that the request stores;
    `tiers` are the allowed service tiers, `limits` those of the key.
    """

    key: str | None = None
    is_admin: bool = False
    tiers: Tiers = EVERY_TIER
    owner: str = ""
    limits: KeyLimits = NO_LIMITS


@dataclass(slots=True)
class EngineTokens:
    """Tokens of the engine's requests for one HTTP request.

    Each of `used` returns the prompt and completion tokens of one request. `prefix` returns how
    many prompt tokens of the last one were read from and written to the prefix cache, `prediction`
    how many tokens of a prediction are in the answer, and how many are not.
    """

    used: list[Counts] = field(default_factory=list)
    prefix: Counts | None = None
    prediction: Counts | None = None

    def total(self) -> tuple[int, int]:
        """Return how many prompt and completion tokens the engine has worked on."""
        used = [count() for count in self.used]
        return sum(prompt for prompt, _ in used), sum(completion for _, completion in used)

    def of_prefix(self) -> tuple[int, int]:
        """Return how many prompt tokens were read from and written to the prefix cache."""
        return (0, 0) if self.prefix is None else self.prefix()

    def close(self) -> None:
        """Drop the references to the engine's request states."""
        self.used.clear()
        self.prefix = self.prediction = None


@dataclass(slots=True)
class RequestRecord:
    """One request from its head to the last byte of its answer.

    `started` is a `time.perf_counter` value. `anthropic`: the client expects the forms of
    Anthropic's API. `internal` is set for requests of the service itself. `tier` is the tier of the
    request, once its body was read. `answer_headers` are added to the answer. `on_end` is called
    after the last byte was sent. `sent_bytes` and `sent_frames` count those of the answer, which is
    `complete` once its last byte was sent. `failure` is the engine's error where vLLM's classes do
    not pass it on. `guide` is how the answer is guided, one of `GUIDES`; `grammars` are the gate's
    verdicts on its constraints: grammars by job key. `custom_tools` are the names of the tools
    whose calls have an input instead of arguments; `compacts`: the answer is a summary, and the
    response has it in an item of compaction. `failure_frames` makes the frames that end a
    stream with an error, where they depend on the frames sent. `error` is the error that ended the
    request. `span` is the request's, None where none is recorded or it has ended; `trace_headers`
    name it to the engine. `direct` sends the frames of a stream that differ in their text alone.
    `key_use` is the request's use of its API key's limits, None without a key. `bounds_answer`: the
    body says how many tokens an answer may have. `echoes_only`: it wants none. `has_beams`: beam
    search makes the answer. `progress` is that of a stream's prompt, None for
    other answers.
    """

    route: Route
    method: str
    started: float
    request_id: str = ""
    anthropic: bool = False
    internal: InternalRequest | None = None
    caller: Caller = Caller()
    stream: bool = False
    status: int = 0
    outcome: str | None = None
    tier: Tier | None = None
    answer_headers: dict[str, str] = field(default_factory=dict)
    on_end: list[Callable[[], None]] = field(default_factory=list)
    deadline: Deadline | None = None
    failure: ServerError | None = None
    guide: str | None = None
    grammars: Mapping[bytes, str | None] = field(default_factory=dict)
    custom_tools: Collection[str] = ()
    compacts: bool = False
    error: ServerError | None = None
    span: Span | None = None
    trace_headers: Mapping[str, str] | None = None
    sent_bytes: int = 0
    sent_frames: int = 0
    failure_frames: Callable[[ServerError], str] | None = None
    complete: bool = False
    drafts: DraftOptions = field(default_factory=DraftOptions)
    tokens: EngineTokens = field(default_factory=EngineTokens)
    direct: DirectFrames = field(default_factory=DirectFrames)
    key_use: KeyUse | None = None
    bounds_answer: bool = False
    echoes_only: bool = False
    has_beams: bool = False
    progress: PromptProgress | None = None

    def reserve(self, tokens: int) -> None:
        """Reserve tokens of the API key until the request ends. Raises `RateLimitError`."""
        if self.key_use is None:
            return
        try:
            self.key_use.reserve(tokens, refusable=not self.status)
        except RateLimitError as error:
            self.failure = error
            raise

    def guided_by(self, kind: str) -> None:
        """Set how the answer is guided, unless the request's own constraint has set it."""
        self.guide = self.guide or kind

    def note(self, error: ServerError) -> None:
        self.error, self.outcome = error, error.outcome

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


def get_record(scope: Scope) -> RequestRecord:
    """Return the record that the outermost middleware created."""
    record: RequestRecord = scope["state"]["record"]
    return record


TIMEOUT_HEADER = "X-Request-Timeout-Ms"
_WHOLE_NUMBER = re.compile("0*[1-9][0-9]{0,11}")


@dataclass(frozen=True, slots=True)
class Deadline:
    """`limit_s` seconds after the request's head; `ends_at` is a `time.perf_counter` value.

    `source` names the flag or header that set it.
    """

    limit_s: float
    ends_at: float
    source: str

    @property
    def remaining_s(self) -> float:
        """Seconds until the end, 0 when it is over."""
        return max(0.0, self.ends_at - time.perf_counter())

    def error(self) -> DeadlineError:
        """Return the client's error for a missed deadline."""
        return DeadlineError(
            f"The answer was not complete after {self.limit_s:g} s, the limit of {self.source}.",
            # A retry would take as long.
            headers={"x-should-retry": "false"},
        )


def get_deadline(headers: Headers, started: float, max_request_s: float) -> Deadline | None:
    """Return the deadline of a request that began at `started` (`time.perf_counter`).

    `max_request_s` 0 sets none. Raises `InvalidValueError` for a header that is no positive
    integer.
    """
    header = headers.get(TIMEOUT_HEADER)
    if header is None:
        if not max_request_s:
            return None
        return Deadline(max_request_s, started + max_request_s, "--max-request-s")
    if not _WHOLE_NUMBER.fullmatch(header):
        raise InvalidValueError(
            f"The header {TIMEOUT_HEADER} must be a positive integer of at most 12 digits, got "
            f"{describe(header)}.",
            param=TIMEOUT_HEADER,
        )
    limit_s = int(header) / 1000
    if max_request_s and max_request_s < limit_s:
        return Deadline(max_request_s, started + max_request_s, "--max-request-s")
    return Deadline(limit_s, started + limit_s, TIMEOUT_HEADER)


REQUEST_ID_HEADER = b"x-request-id"
ANTHROPIC_ID_HEADER = b"request-id"
"""Header in which Anthropic's API returns it."""

_HARMLESS = re.compile(rb"[A-Za-z0-9._:-]{1,128}")


def get_request_id(headers: Iterable[tuple[bytes, bytes]]) -> str:
    """Return the client's id if it is valid, else a new one."""
    for name, value in headers:
        if name == REQUEST_ID_HEADER and _HARMLESS.fullmatch(value):
            return value.decode("ascii")
    return uuid.uuid4().hex
