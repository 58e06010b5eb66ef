"""The port between the HTTP edge and what generates: endpoints in, JSON or SSE frames out.

The edge knows nothing of the engine beyond these protocols; `vllm` and `engine`
implement them, and the tests have a scripted implementation. Invariant: a `Frontend` reports
every failure as a `ServerError`, before the first frame wherever it can know then.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from starlette.requests import Request

if TYPE_CHECKING:
    from server.host.job_counts import JobCounts
    from server.lora.registry import AdapterRegistry
    from server.observability.tracing import Tracing
    from server.storage.quotas import Reservation
    from server.structured_outputs.gate import GrammarGate
    from server.tools.support import ToolSupport

JsonObject = dict[str, Any]
_DATA = "\ndata: "


@dataclass(frozen=True, slots=True)
class Capacity:
    """What an engine takes: sequences in one step, and prompt tokens that wait (None: any).

    `decode_buckets` are the rows of its decode graphs, rising; none where it pools.
    """

    max_num_seqs: int
    max_queued_tokens: int | None
    decode_buckets: tuple[int, ...] = ()


class Endpoint(enum.Enum):
    """The endpoints that need the engine; the value is the path, the method is POST."""

    CHAT = "/v1/chat/completions"
    COMPLETION = "/v1/completions"
    RESPONSES = "/v1/responses"
    INPUT_TOKENS = "/v1/responses/input_tokens"
    COMPACT = "/v1/responses/compact"
    MESSAGES = "/v1/messages"
    COUNT_TOKENS = "/v1/messages/count_tokens"
    TOKENIZE = "/tokenize"
    DETOKENIZE = "/detokenize"
    EMBEDDINGS = "/v1/embeddings"
    COHERE_EMBED = "/v2/embed"
    POOLING = "/pooling"
    CLASSIFY = "/classify"
    SCORE = "/score"
    SCORE_V1 = "/v1/score"
    RERANK = "/rerank"
    RERANK_V1 = "/v1/rerank"
    RERANK_V2 = "/v2/rerank"

    @property
    def anthropic(self) -> bool:
        """Whether clients expect Anthropic's envelopes and events."""
        return self in (Endpoint.MESSAGES, Endpoint.COUNT_TOKENS)

    @property
    def takes_items(self) -> bool:
        """Whether a request has the items of the Responses API as its input."""
        return self in (Endpoint.RESPONSES, Endpoint.INPUT_TOKENS, Endpoint.COMPACT)

    @property
    def pools(self) -> bool:
        """Whether it is for models that pool: embeddings, scores, classes."""
        return self in _POOLING_ENDPOINTS

    @property
    def scores(self) -> bool:
        """Whether each answer is about a query and a document."""
        return self in _SCORING_ENDPOINTS

    @property
    def named_events(self) -> bool:
        """Whether each SSE frame has an `event:` line and nothing ends with [DONE]."""
        return self in (Endpoint.MESSAGES, Endpoint.RESPONSES)


_SCORING_ENDPOINTS = frozenset(
    (
        Endpoint.SCORE,
        Endpoint.SCORE_V1,
        Endpoint.RERANK,
        Endpoint.RERANK_V1,
        Endpoint.RERANK_V2,
    )
)
_POOLING_ENDPOINTS = _SCORING_ENDPOINTS | {
    Endpoint.EMBEDDINGS,
    Endpoint.COHERE_EMBED,
    Endpoint.POOLING,
    Endpoint.CLASSIFY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSchemas:
    """JSON schemas of the endpoints that the served model offers.

    References point into `#/components/schemas/`, which is what `definitions` is for.
    """

    requests: Mapping[Endpoint, JsonObject]
    answers: Mapping[Endpoint, JsonObject]
    definitions: Mapping[str, JsonObject]
    streaming: Collection[Endpoint]
    """The endpoints that can answer with a stream of events."""


@dataclass(slots=True, kw_only=True)
class StorageOptions:
    """Storage fields of a request of the Responses API.

    `store` is None where the request has no such field. `previous` is the id of the response that
    it continues; `items` is a JSON array with the items of its own input. `is_stored` says whether
    the response will be stored, within `reservation`.
    """

    store: bool | None
    background: bool
    previous: str | None
    stream: bool
    items: bytes
    is_stored: bool = False
    reservation: Reservation | None = None


@dataclass(slots=True, kw_only=True)
class ReadRequest:
    """A body that passed every check that needs no engine.

    `answers` is how many it asks for; `parsed` is what the front end that read it will need of it.
    `large`: to go through all of it takes too long for the event loop. `tier` is the service tier
    that it asks for, by OpenAI's name. `stamp` are fields that the answer shall have.
    `storage_options` is None for endpoints that take no items.
    """

    answers: int
    parsed: Any
    large: bool = False
    tier: str | None = None
    stamp: JsonObject = field(default_factory=dict)
    storage_options: StorageOptions | None = None


class Profiler(Protocol):
    """Records what the engine's steps do."""

    async def start_profile(self) -> None:
        """Record from now on."""
        ...

    async def stop_profile(self) -> None:
        """Write what was recorded."""
        ...


class Frontend(Protocol):
    """Turns request bodies into answers; usable from the moment the service is ready."""

    @property
    def keep_alive_s(self) -> float:
        """Seconds of silence after which a stream gets a comment; 0: it never does."""
        ...

    @property
    def tracing(self) -> Tracing | None:
        """What makes spans of requests, None when nobody collects them."""
        ...

    def schemas(self) -> WireSchemas:
        """Return what the offered endpoints take and answer; takes about a second."""
        ...

    @property
    def capacity(self) -> Capacity:
        """What the engine behind it takes."""
        ...

    @property
    def tools(self) -> ToolSupport:
        """Support for tools of the served model."""
        ...

    async def read(
        self, endpoint: Endpoint, raw: bytes, before: bytes | None = None
    ) -> ReadRequest:
        """Return what a body asks for; a large one is read where it holds nobody up.

        `before` are items of a conversation, a JSON array, that go before those of the body. A
        body that continues one and is read without them is read no further than that: `parsed` is
        None then. Raises the `ServerError` of what is wrong with it.
        """
        ...

    def take_reading(self) -> JobCounts:
        """Return what was done with large bodies since the last call."""
        ...

    async def handle(
        self, endpoint: Endpoint, given: ReadRequest, request: Request
    ) -> bytes | AsyncGenerator[str, None]:
        """Return the JSON body of the answer, or its SSE frames.

        Raises a `ServerError` for anything wrong, also from the generator. Cancelling the call
        or closing the generator aborts the request in the engine.
        """
        ...

    async def models(self) -> list[JsonObject]:
        """Return the served models as OpenAI's model objects."""
        ...

    @property
    def adapters(self) -> AdapterRegistry | None:
        """The LoRA adapters, None when they are switched off."""
        ...

    @property
    def grammars(self) -> GrammarGate | None:
        """The gate of structured outputs, None when the model does not generate text."""
        ...

    @property
    def profiler(self) -> Profiler | None:
        """What records profiles, None when it was not switched on."""
        ...


class RunningEngine(Protocol):
    """An engine that has answered its self-test."""

    @property
    def frontend(self) -> Frontend:
        """What answers requests."""
        ...

    def failure(self) -> str | None:
        """Return why the engine is dead, None while it lives. Cheap: polled several times a s."""
        ...

    async def shutdown(self, timeout_s: float) -> None:
        """Stop the engine; it gets `timeout_s` seconds to end by itself."""
        ...

    def kill(self) -> None:
        """End the engine at once; a `shutdown` that is under way returns."""
        ...


class EngineLauncher(Protocol):
    """Builds the engine."""

    def versions(self) -> Mapping[str, str]:
        """Return the versions of what runs, by component; known before the launch."""
        ...

    def expected_s(self) -> float | None:
        """Return the seconds from the process's start to ready that a launch like this takes."""
        ...

    def keep_ready_s(self, seconds: float) -> None:
        """Remember in how many seconds this launch was ready."""
        ...

    async def launch(self) -> RunningEngine:
        """Build the engine and prove it with one token. Raises `LaunchError`."""
        ...

    async def abandon(self) -> None:
        """Give up a launch that is under way; returns within about a second."""
        ...


class LaunchError(Exception):
    """The engine could not be built; `exit_code` is 2 when the command line is at fault."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def named_frame(name: str, data: bytes | str) -> str:
    """Return the frame of one event with a name; `data` is JSON in one line."""
    text = data if isinstance(data, str) else data.decode()
    return f"event: {name}{_DATA}{text}\n\n"


def data_text(frame: str) -> bytes:
    """Return the data of a frame with a name, as its text."""
    return frame.partition(_DATA)[2].encode()
