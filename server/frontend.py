"""Interface between the HTTP layer and the engine: request bodies in, JSON or SSE frames out.

`server.vllm` and `server.engine` implement these protocols; the tests have a scripted
implementation. Invariant: a `Frontend` reports every failure as a `ServerError`, before the first
frame if it is known by then.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from pydantic import BaseModel
from starlette.requests import Request

from server.admission import Capacity
from server.host.job_pool import JobCounts
from server.lora.registry import AdapterRegistry
from server.observability.tracing import Tracing
from server.request.options import DraftOptions
from server.storage.response_table import StorageOptions
from server.structured_outputs.constraint import Constraint
from server.structured_outputs.gate import GrammarGate
from server.tools import ToolSupport
from server.wire import Endpoint, JsonObject


@dataclass(frozen=True, slots=True, kw_only=True)
class WireSchemas:
    """JSON schemas of the endpoints that the served model offers.

    References point into `#/components/schemas/`, the keys of `definitions`.
    """

    requests: Mapping[Endpoint, JsonObject]
    answers: Mapping[Endpoint, JsonObject]
    definitions: Mapping[str, JsonObject]
    streaming: Collection[Endpoint]
    """The endpoints that can answer with a stream of events."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedRequest:
    """A body that passed every check that needs no engine.

    In the server, `server.vllm.reading.BodyReader.read` alone creates one
    (tests/edges/test_reading.py), so that no handler receives an unchecked request.
    """

    answers: int
    """Answers that the request takes permits for: `n` for each prompt."""
    fields: JsonObject
    """Fields that hold one value each: no prompts, tools or grammars."""
    form: str = ""
    """Form of the request (`server.request.endpoints`), which selects vLLM's serving class."""
    model: BaseModel | None = None
    """vLLM's request model; None in scripted front ends."""
    error_field: str | None = None
    """Field that an error about a prompt longer than the context names."""
    constraints: list[list[Constraint]] = field(default_factory=list)
    """Constraints of the answer; those of one list are compiled together."""
    custom_tools: frozenset[str] = frozenset()
    """Names of the custom tools, each of which `model` has as a function."""
    compacts: bool = False
    """True if the response is a compaction item with the text of the answer."""
    forbidding: list[str] = field(default_factory=list)
    """Fields that forbid tokens."""
    ignored: list[str] = field(default_factory=list)
    """Paths of the fields without effect."""
    drafts: DraftOptions = field(default_factory=DraftOptions)
    returns_progress: bool = False
    """True if a stream's chunks have the progress of its prompt."""
    tier: str | None = None
    """Service tier that the body names, by OpenAI's name."""
    extra_fields: JsonObject = field(default_factory=dict)
    """Fields of the answer that depend on the request alone."""
    storage_options: StorageOptions | None = None
    """None for endpoints that take no items."""
    is_large: bool = False
    """True if the body is too large to be walked on the event loop."""


class Profiler(Protocol):
    """Records the engine's steps."""

    async def start_profile(self) -> None:
        """Start recording."""

    async def stop_profile(self) -> None:
        """Stop recording and write the profile."""


class Frontend(Protocol):
    """Turns request bodies into answers; usable once the service is ready."""

    @property
    def keep_alive_s(self) -> float:
        """Seconds of silence after which a stream gets a comment; 0 sends none."""

    @property
    def tracing(self) -> Tracing | None:
        """Factory of request spans, None without an endpoint for traces."""

    def schemas(self) -> WireSchemas:
        """Return the schemas of the offered endpoints; takes about a second."""

    @property
    def endpoints(self) -> frozenset[Endpoint]:
        """Endpoints that the served model offers."""

    @property
    def capacity(self) -> Capacity:
        """Capacity of the engine."""

    @property
    def tools(self) -> ToolSupport:
        """Support for tools of the served model."""

    async def read(
        self, endpoint: Endpoint, raw: bytes, before: bytes | None = None
    ) -> ParsedRequest | StorageOptions:
        """Parse a body; a large one is parsed in another process.

        `before` is a JSON array with the earlier items of the conversation. Without it, a body that
        continues a stored response returns its storage options only. Raises the `ServerError` of
        the first invalid field.
        """

    def take_reading(self) -> JobCounts:
        """Return the counts of large bodies since the last call."""

    async def handle(
        self, endpoint: Endpoint, parsed: ParsedRequest, extra_fields: JsonObject, request: Request
    ) -> bytes | AsyncGenerator[str, None]:
        """Return the JSON body of the answer, or its SSE frames.

        `extra_fields` are added to the answer. Raises a `ServerError`, also from the generator.
        Cancelling the call or closing the generator aborts the request in the engine.
        """

    async def reset_prefix_cache(self, *, preempt: bool, tiers: bool) -> bool:
        """Forget the KV of all prompts; return False if requests hold blocks.

        With `preempt` these requests are preempted, and compute their prompts again. With `tiers`
        the KV tiers are emptied, too; False without tiers.
        """

    async def tokenizer_info(self) -> JsonObject | None:
        """Return the tokenizer's configuration as vLLM does, None if it was not switched on."""

    async def models(self) -> list[JsonObject]:
        """Return the served models as OpenAI's model objects."""

    @property
    def adapters(self) -> AdapterRegistry | None:
        """The LoRA adapters, None when they are switched off."""

    @property
    def grammars(self) -> GrammarGate | None:
        """The gate of structured outputs, None for a model that does not generate text."""

    @property
    def profiler(self) -> Profiler | None:
        """The profiler, None if it was not switched on."""


class RunningEngine(Protocol):
    """An engine that has answered its self-test."""

    @property
    def frontend(self) -> Frontend:
        """The front end of this engine."""

    def failure(self) -> str | None:
        """Return why the engine has failed, else None. Polled several times a second."""

    async def shutdown(self, timeout_s: float) -> None:
        """Stop the engine; it is killed after `timeout_s` seconds."""

    def kill(self) -> None:
        """Kill the engine; a running `shutdown` returns."""


class EngineLauncher(Protocol):
    def versions(self) -> Mapping[str, str]:
        """Return the versions of the components; known before the launch."""

    def expected_s(self) -> float | None:
        """Return the seconds from the process's start to ready that a launch like this takes."""

    def keep_ready_s(self, seconds: float) -> None:
        """Remember in how many seconds this launch was ready."""

    async def launch(self) -> RunningEngine:
        """Build the engine and prove it with one token. Raises `LaunchError`."""

    async def abandon(self) -> None:
        """Abort a running launch; returns within about a second."""


class LaunchError(Exception):
    """The engine could not be built; `exit_code` is 2 for an invalid command line."""

    def __init__(self, message: str, *, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code
