"""A scripted implementation of `server.frontend`, and the real service on a real socket over it."""

import asyncio
import itertools
import json
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import fastapi.routing
import httpx
import pytest
from pydantic_core import to_json
from starlette.requests import Request

from rbln_backend.lora.adapter_files import Target
from server import bounds
from server.admission import Capacity
from server.errors import ContextLengthError, InternalError, ModelNotFoundError, OverloadedError
from server.frontend import LaunchError, ParsedRequest, WireSchemas
from server.host import files
from server.host.job_pool import JobCounts
from server.lora.folder import ServedModel
from server.lora.registry import Adapter, AdapterRegistry, StateFile
from server.observability.tracing import Tracing
from server.request.body import parse_json_object
from server.request.endpoints import answers_in
from server.request.options import pop_progress, pop_tier
from server.request.record import get_record, record_var
from server.service import serve
from server.settings import ServerSettings
from server.storage import services
from server.storage.response_table import StorageOptions, take_storage_options
from server.structured_outputs.gate import GrammarGate
from server.tools import ToolSupport
from server.wire import Endpoint, JsonObject, PromptProgress
from tests.server.adapter_folders import TARGETS

# Each test makes an application, of which the validators of its answers are a half.
fastapi.routing.create_model_field = cache(fastapi.routing.create_model_field)  # type: ignore[assignment]

SHOWN = ToolSupport("template", "hermes", "it names them")


@dataclass
class ScriptedProfiler:
    calls: list[str] = field(default_factory=list)

    async def start_profile(self) -> None:
        self.calls.append("start")

    async def stop_profile(self) -> None:
        self.calls.append("stop")


@dataclass
class ScriptedFrontend:
    """Does what the body's `do` says; notes what was cancelled and what ran to its end."""

    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    ended: list[str] = field(default_factory=list)
    headers: Mapping[str, str] = field(default_factory=dict)
    adapters: AdapterRegistry | None = None
    grammars: GrammarGate | None = None
    keep_alive_s: float = 0.0
    tracing: Tracing | None = None
    profiler: ScriptedProfiler | None = None
    resets: list[tuple[bool, bool]] = field(default_factory=list)
    max_json_depth: int = 64
    tools: ToolSupport = SHOWN
    tokenizer: JsonObject | None = None
    endpoints: frozenset[Endpoint] = frozenset(Endpoint)

    @property
    def capacity(self) -> Capacity:
        return Capacity(max_num_seqs=8, max_queued_tokens=1000)

    def schemas(self) -> WireSchemas:
        schema = {Endpoint.CHAT: {"type": "object"}}
        return WireSchemas(requests=schema, answers=schema, definitions={}, streaming=set(schema))

    async def reset_prefix_cache(self, *, preempt: bool, tiers: bool) -> bool:
        self.resets.append((preempt, tiers))
        return preempt

    async def tokenizer_info(self) -> JsonObject | None:
        return self.tokenizer

    async def models(self) -> list[JsonObject]:
        return [{"id": "scripted", "object": "model"}]

    async def read(
        self, endpoint: Endpoint, raw: bytes, before: bytes | None = None
    ) -> ParsedRequest | StorageOptions:
        body = parse_json_object(raw, self.max_json_depth)
        options = take_storage_options(endpoint, body, before) if endpoint.takes_items else None
        if options is not None and options.previous is not None and before is None:
            return options
        tier = pop_tier(endpoint, body)
        returns_progress, _ = pop_progress(endpoint, body)
        return ParsedRequest(
            answers=answers_in(endpoint, body),
            fields=body,
            returns_progress=returns_progress,
            tier=tier,
            storage_options=options,
        )

    def take_reading(self) -> JobCounts:
        return JobCounts()

    async def handle(
        self, endpoint: Endpoint, parsed: ParsedRequest, extra_fields: JsonObject, request: Request
    ) -> bytes | AsyncGenerator[str, None]:
        body = parsed.fields
        self.headers = dict(request.headers)
        if (uses := body.get("uses")) is not None:
            get_record(request.scope).tokens.used.append(lambda: (uses[0], uses[1]))
        if (tokens := body.get("reserves")) is not None:
            use = get_record(request.scope).key_use
            assert use is not None
            use.reserve(tokens)
        if "progress" in body:
            self._show_progress(body["progress"], get_record(request.scope).progress)
        if endpoint is Endpoint.RESPONSES and "do" not in body:
            return await self._respond(body, extra_fields)
        if body.get("stream"):
            return self._stream(body["do"])
        if body["do"] == "wait":
            await self._wait("answer")
        if body["do"] == "refuse":
            raise ContextLengthError("too long", param="messages")
        if body["do"] == "busy":
            self.ended.append("busy")
            raise OverloadedError("full", retry_after_s=body["after"])
        if body["do"] == "break":
            raise RuntimeError("secret detail")
        return b'{"ok":true}'

    def _show_progress(self, processed: list[int], progress: PromptProgress | None) -> None:
        """Report a prompt of 100 tokens, 10 of them a hit, 50 ms after another."""
        assert progress is not None
        progress.is_expected = True
        for number, tokens in enumerate(processed, 1):
            report = {"processed": tokens, "total": 100, "cache": 10, "time_ms": 10 * number}
            asyncio.get_running_loop().call_later(number * 0.05, progress.update, report)

    async def _respond(
        self, body: JsonObject, extra_fields: JsonObject
    ) -> bytes | AsyncGenerator[str, None]:
        """Answers how many items it got; waits for `go_on` where the body says so."""
        if body.get("stream"):
            return self._events(body, extra_fields)
        if body.get("user") == "wait":
            await self._wait("response")
        return to_json(make_response(body, extra_fields))

    async def _events(
        self, body: JsonObject, extra_fields: JsonObject
    ) -> AsyncGenerator[str, None]:
        frames = events_of(make_response(body, extra_fields))
        for number, frame in enumerate(frames):
            if number == 3 and body.get("user") == "wait":
                await self._wait("events")
            yield frame

    async def _wait(self, name: str) -> None:
        try:
            await self.go_on.wait()
            self.ended.append(f"{name} finished")
        except (asyncio.CancelledError, GeneratorExit):
            self.ended.append(f"{name} aborted")
            raise

    async def _stream(self, do: str) -> AsyncGenerator[str, None]:
        if do == "refuse":
            raise ContextLengthError("too long", param="messages")
        if do == "late":
            await self._wait("stream")
        yield "data: first\n\n"
        if do == "wait":
            await self._wait("stream")
        if do == "break":
            raise InternalError("broken")
        if do == "crash":
            raise RuntimeError("secret detail")
        while do == "flood":
            yield f"data: {'x' * 65536}\n\n"
        yield "data: [DONE]\n\n"


@dataclass
class ScriptedEngine:
    """An engine that dies on demand."""

    frontend: ScriptedFrontend
    death: str | None = None
    shut_down: bool = False

    def failure(self) -> str | None:
        return self.death

    killed: asyncio.Event = field(default_factory=asyncio.Event)
    ends_by_itself: bool = True

    async def shutdown(self, timeout_s: float) -> None:
        self.shut_down = True
        if not self.ends_by_itself:
            await asyncio.wait_for(self.killed.wait(), timeout_s)

    def kill(self) -> None:
        self.killed.set()


@dataclass
class ScriptedLauncher:
    """Launches at once, or when `launched` is set, or not at all."""

    launched: asyncio.Event = field(default_factory=asyncio.Event)
    error: LaunchError | None = None
    abandoned: bool = False
    engine: ScriptedEngine = field(default_factory=lambda: ScriptedEngine(ScriptedFrontend()))
    earlier_s: float | None = None
    kept_s: float | None = None

    def expected_s(self) -> float | None:
        return self.earlier_s

    def keep_ready_s(self, seconds: float) -> None:
        self.kept_s = seconds

    def versions(self) -> Mapping[str, str]:
        return {"version": "1.2.3", "vllm": "0"}

    async def launch(self) -> ScriptedEngine:
        await self.launched.wait()
        if self.error is not None:
            raise self.error
        return self.engine

    async def abandon(self) -> None:
        self.abandoned = True


@dataclass
class Running:
    """The service under test; `exit_code` is a task."""

    launcher: ScriptedLauncher
    client: httpx.AsyncClient
    exit_code: asyncio.Task[int]
    port: int
    run_dir: Path

    @property
    def frontend(self) -> ScriptedFrontend:
        return self.launcher.engine.frontend

    async def until_ready(self) -> None:
        while (await self.client.get("/readyz")).status_code != 200:
            await asyncio.sleep(0.01)

    def signal(self) -> None:
        """Send this process the signal that an orchestrator would send."""
        os.kill(os.getpid(), signal.SIGTERM)

    async def metric(self, line_start: str) -> float:
        """The value of the one metrics line that starts so, 0 when there is none."""
        page = (await self.client.get("/metrics")).text
        values = [line.split()[-1] for line in page.splitlines() if line.startswith(line_start)]
        assert len(values) <= 1, values
        return float(values[0]) if values else 0.0

    async def until(self, line_start: str, least: float = 1.0) -> None:
        """Wait until a metric is at least so much."""
        while await self.metric(line_start) < least:
            await asyncio.sleep(0.01)


@asynccontextmanager
async def running(
    tmp_path: Path,
    launcher: ScriptedLauncher | None = None,
    client_context: ssl.SSLContext | bool = True,
    **settings: Any,
) -> AsyncIterator[Running]:
    """Serve on a free port for the length of the block; ready at once without a `launcher`.

    `settings` are those of `ServerSettings`, and changed values of `server.bounds` in lower case.
    `client_context` is what the client has for TLS; it comes from this host like every client.
    """
    import time

    if launcher is None:
        launcher = ScriptedLauncher()
        launcher.launched.set()
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    names = {"death_linger_s", *(name for name in settings if hasattr(bounds, name.upper()))}
    patch = pytest.MonkeyPatch()
    # Nothing looks more often in production; here each look is waited for.
    patch.setattr(files, "_PERIOD_S", 0.1)
    patch.setattr(services, "_REFRESH_S", 0.2)
    for name in names:
        patch.setattr(bounds, name.upper(), settings.pop(name, 0.3))
    config = ServerSettings(**{"host": "127.0.0.1", **settings})
    task = asyncio.create_task(serve(config, launcher, listener, tmp_path, time.monotonic()))
    url = f"{'https' if config.ssl_certfile else 'http'}://127.0.0.1:{port}"
    # Without TLS the client needs no certificates, which take 50 ms to load.
    verify = client_context if config.ssl_certfile else False
    async with httpx.AsyncClient(base_url=url, timeout=10, verify=verify) as client:
        service = Running(launcher, client, task, port, tmp_path)
        try:
            if launcher.launched.is_set() and launcher.error is None:
                await service.until_ready()
            yield service
        finally:
            launcher.engine.frontend.go_on.set()
            if not task.done():
                service.signal()
            try:
                with suppress(asyncio.CancelledError):
                    await asyncio.wait_for(task, 10)
            finally:
                patch.undo()


async def said(caplog: pytest.LogCaptureFixture, words: str) -> None:
    """Wait until the log says so."""
    async with asyncio.timeout(10):
        while words not in caplog.text:
            await asyncio.sleep(0.02)


# -------------------------------------------------------------------------------- scripted adapters
@dataclass
class ScriptedPort:
    """An engine with a few slots; it fails the call that `broken` names, and counts what it did."""

    max_loras: int = 2
    read: asyncio.Event = field(default_factory=asyncio.Event)
    unreadable: str = ""
    broken: str = ""
    in_slots: dict[int, int] = field(default_factory=dict)
    paths: dict[int, str] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.read.set()

    async def targets(self) -> Mapping[str, Target]:
        return TARGETS

    async def stage(self, adapter: Adapter) -> None:
        await self._called("stage")
        self.paths[adapter.id] = adapter.path

    async def staged(self, adapter_id: int) -> tuple[str, str]:
        await asyncio.sleep(0)
        if self.unreadable:
            return "failed", self.unreadable
        return ("ready" if self.read.is_set() else "reading"), ""

    async def add(self, adapter: Adapter) -> None:
        await self._called("add")
        free = set(range(self.max_loras)) - set(self.in_slots.values())
        self.in_slots[adapter.id] = min(free)

    async def remove(self, adapter_id: int) -> None:
        await self._called("remove")
        self.in_slots.pop(adapter_id, None)
        self.paths.pop(adapter_id, None)

    async def slots(self) -> Mapping[int, int]:
        return self.in_slots

    async def _called(self, name: str) -> None:
        self.calls.append(name)
        await asyncio.sleep(0)
        if self.broken == name:
            raise InternalError(f"{name} does not work")


@dataclass
class AdapterFrontend(ScriptedFrontend):
    """Leases the adapter that a body names as its model, as the real front end does."""

    async def models(self) -> list[JsonObject]:
        ready = self.adapters.ready() if self.adapters is not None else ()
        cards = ({"id": adapter.name, "root": adapter.path} for adapter in ready)
        return [*await super().models(), *cards]

    async def handle(
        self, endpoint: Endpoint, parsed: ParsedRequest, extra_fields: JsonObject, request: Request
    ) -> bytes | AsyncGenerator[str, None]:
        body = parsed.fields
        if body["model"] != "tiny":
            assert self.adapters is not None
            adapter = self.adapters.lease(body["model"])
            if adapter is None:
                raise ModelNotFoundError("no such model", param="model")
            get_record(request.scope).on_end.append(partial(self.adapters.release, adapter))
        return await super().handle(endpoint, parsed, extra_fields, request)


def registry(
    port: ScriptedPort, root: Path | None, state_file: Path | None = None
) -> AdapterRegistry:
    base = ServedModel.of(["tiny"], TARGETS, max_rank=8)
    return AdapterRegistry(
        port,
        base,
        reserved_names=frozenset({"tiny"}),
        max_loras=port.max_loras,
        root=root,
        state_file=None if state_file is None else StateFile(state_file),
    )


def launcher(adapters: AdapterRegistry | None) -> ScriptedLauncher:
    made = ScriptedLauncher(engine=ScriptedEngine(AdapterFrontend(adapters=adapters)))
    made.launched.set()
    return made


# ------------------------------------------------------------------------------------ scripted chat
Script = Sequence[JsonObject | float | str]
"""Deltas of a chat's answer, seconds to pause, and "break" for an error."""


@dataclass
class ChatFrontend(ScriptedFrontend):
    """Streams scripts by the text of the last message; keeps the bodies that it got."""

    scripts: Mapping[str, Script] = field(default_factory=dict)
    bodies: list[JsonObject] = field(default_factory=list)

    async def handle(
        self, endpoint: Endpoint, parsed: ParsedRequest, extra_fields: JsonObject, request: Request
    ) -> bytes | AsyncGenerator[str, None]:
        if endpoint is not Endpoint.CHAT:
            return await super().handle(endpoint, parsed, extra_fields, request)
        self.bodies.append(parsed.fields)
        return self._chat(self.scripts[parsed.fields["messages"][-1]["content"]])

    async def _chat(self, script: Script) -> AsyncGenerator[str, None]:
        tokens, reason = 0, "stop"
        for piece in script:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
                continue
            if isinstance(piece, str):
                raise InternalError("broken")
            tokens += 1
            reason = "tool_calls" if "tool_calls" in piece else reason
            yield _frame({"choices": [{"index": 0, "delta": piece, "finish_reason": None}]})
        yield _frame({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        yield _frame({"choices": [], "usage": {"completion_tokens": tokens}})
        yield "data: [DONE]\n\n"


def _frame(event: JsonObject) -> str:
    return f"data: {json.dumps(event)}\n\n"


# ------------------------------------------------------------------------------- scripted responses
_numbers = itertools.count()


def make_response(body: dict[str, Any], extra_fields: dict[str, Any]) -> dict[str, Any]:
    """An answer that says how many items the request had."""
    given = body["input"]
    text = f"{len(given) if isinstance(given, list) else 1} items"
    record = record_var.get()
    internal = None if record is None else record.internal
    name = None if internal is None else internal.response_id
    name = name or f"resp_{time.time_ns()}{next(_numbers)}"
    part = {"type": "output_text", "text": text, "annotations": []}
    message = {"type": "message", "role": "assistant", "status": "completed", "content": [part]}
    return {
        "id": name,
        "object": "response",
        "created_at": int(time.time()),
        "status": "completed",
        "model": "scripted",
        "output": [{"id": f"msg_{name}", **message}],
        **extra_fields,
    }


def events_of(response: dict[str, Any]) -> list[str]:
    """The frames of its stream."""
    begun = {**response, "status": "in_progress", "output": []}
    events: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": begun}),
        ("response.in_progress", {"response": begun}),
        *(
            ("response.output_text.delta", {"delta": letter})
            for letter in response["output"][0]["content"][0]["text"]
        ),
        ("response.completed", {"response": response}),
    ]
    return [
        f"event: {kind}\ndata: "
        + to_json({"type": kind, "sequence_number": number, **fields}).decode()
        + "\n\n"
        for number, (kind, fields) in enumerate(events)
    ]
