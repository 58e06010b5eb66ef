"""Committing to a stream: what is held back, what raises, what is closed."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from server.errors import InvalidValueError
from server.http.streaming import HeldStream, commit, until_disconnect
from server.observability.tracing import Tracing
from server.request.body import ClientGoneError
from server.settings import export_service_name
from tests.server.scripted import Running, ScriptedLauncher, running

PRELUDE = (":",)


class Source:
    """A stream of frames; an exception among them is raised, "wait" waits for `go_on`."""

    def __init__(self, *frames: str | Exception) -> None:
        self.frames = frames
        self.go_on = asyncio.Event()
        self.closed = False

    async def stream(self) -> AsyncGenerator[str, None]:
        try:
            for frame in self.frames:
                if isinstance(frame, Exception):
                    raise frame
                if frame == "wait":
                    await self.go_on.wait()
                    continue
                yield frame
        finally:
            self.closed = True


async def collect(stream: HeldStream) -> list[str]:
    return [frame async for frame in stream]


@pytest.mark.parametrize("frames", [(), ("a",), (":", "a", "b"), (":",), ("a", ":", "b")])
async def test_nothing_is_lost_or_reordered(frames: tuple[str, ...]) -> None:
    source = Source(*frames)
    assert await collect(await commit(source.stream(), PRELUDE, 1.0)) == list(frames)
    assert source.closed


async def test_an_error_after_prelude_only_raises() -> None:
    source = Source(":", InvalidValueError("bad"), "a")
    with pytest.raises(InvalidValueError):
        await commit(source.stream(), PRELUDE, 1.0)
    assert source.closed


async def test_an_error_after_content_stays_in_the_stream() -> None:
    stream = await commit(Source("a", InvalidValueError("bad")).stream(), PRELUDE, 1.0)
    assert await anext(stream) == "a"
    with pytest.raises(InvalidValueError):
        await anext(stream)


async def test_a_slow_stream_is_returned_at_the_timeout_and_goes_on() -> None:
    source = Source(":", "wait", "a", "b")
    stream = await commit(source.stream(), PRELUDE, 0.01)
    assert await anext(stream) == ":"
    source.go_on.set()
    assert await collect(stream) == ["a", "b"]


async def test_a_slow_stream_may_end_without_a_frame() -> None:
    source = Source("wait")
    stream = await commit(source.stream(), PRELUDE, 0.01)
    source.go_on.set()
    assert await collect(stream) == []


@pytest.mark.parametrize("consumed", [0, 1])
async def test_closing_a_waiting_stream_closes_the_source(consumed: int) -> None:
    source = Source(":", "wait", "a")
    stream = await commit(source.stream(), PRELUDE, 0.01)
    for _ in range(consumed):
        await anext(stream)
    await stream.aclose()
    await asyncio.sleep(0.01)
    assert source.closed


async def test_cancelling_the_commit_closes_the_source() -> None:
    source = Source("wait")
    task = asyncio.create_task(commit(source.stream(), PRELUDE, 10.0))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert source.closed


async def test_work_that_ends_first_wins() -> None:
    async def receive() -> dict[str, str]:
        await asyncio.sleep(10)
        return {"type": "http.disconnect"}

    async def work() -> int:
        return 5

    assert await until_disconnect(receive, work()) == 5


async def test_a_disconnect_cancels_the_work() -> None:
    cancelled = asyncio.Event()

    async def receive() -> dict[str, str]:
        await asyncio.sleep(0.01)
        return {"type": "http.disconnect"}

    async def work() -> None:
        try:
            await asyncio.sleep(10)
        finally:
            cancelled.set()

    with pytest.raises(ClientGoneError):
        await until_disconnect(receive, work())
    assert cancelled.is_set()


# ---------------------------------------------------------------------------------- prompt progress
async def _frames(service: Running, until: int, path: str, **fields: Any) -> list[str]:
    """Return the first frames of a stream whose answer waits, and let it go on."""
    body = {"do": "wait", "stream": True, "progress": [40, 60, 20, 90], **fields}
    frames: list[str] = []
    async with service.client.stream("POST", path, json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            frames += [line] if line else []
            if len(frames) == until:
                service.frontend.go_on.set()
    return frames


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
async def test_a_stream_has_comments(tmp_path: Path, path: str) -> None:
    async with running(tmp_path, stream_commit_s=0.01) as service:
        frames = await _frames(service, 3, path)
        assert frames[:2] == ["data: first", ": prompt 40/100 tokens, about 0.0 s left"]
        # At most one in a second; the latest, 40 ms for 80 of 90 tokens.
        assert frames[2:] == [": prompt 90/100 tokens, about 0.0 s left", "data: [DONE]"]


async def test_chunks_on_request_come_after_every_step(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        frames = await _frames(
            service, 4, "/v1/chat/completions", return_progress=True, model="scripted"
        )
    chunks = [json.loads(frame[6:]) for frame in frames if "prompt_progress" in frame]
    assert [chunk["prompt_progress"] for chunk in chunks] == [
        {"processed": 40, "total": 100, "cache": 10, "time_ms": 10, "eta_ms": 20},
        {"processed": 60, "total": 100, "cache": 10, "time_ms": 20, "eta_ms": 16},
        {"processed": 90, "total": 100, "cache": 10, "time_ms": 40, "eta_ms": 5},
    ]
    assert {(c["object"], c["model"], len(c["choices"])) for c in chunks} == {
        ("chat.completion.chunk", "scripted", 0)
    }
    assert frames[-1] == "data: [DONE]"


async def test_the_first_progress_commits_a_stream_that_asked_for_it(tmp_path: Path) -> None:
    async with running(tmp_path, stream_commit_s=60) as service:
        body = {"do": "late", "stream": True, "progress": [40], "return_progress": True}
        async with service.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.aiter_lines()
            chunk = json.loads((await anext(lines))[6:])
            assert (chunk["object"], chunk["model"]) == ("text_completion", "scripted")
            service.frontend.go_on.set()
            assert "data: [DONE]" in [line async for line in lines]


@pytest.mark.parametrize("value", ["yes", 1])
async def test_a_wrong_value_is_refused(tmp_path: Path, value: object) -> None:
    async with running(tmp_path) as service:
        body = {"do": "answer", "return_progress": value}
        answer = await service.client.post("/v1/chat/completions", json=body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "return_progress")


# -------------------------------------------------------------------------------------------- spans
CHAT = "/v1/chat/completions"
ERROR, UNSET = StatusCode.ERROR, StatusCode.UNSET


class Traced:
    """A scripted service and the spans that it has recorded, the oldest first."""

    def __init__(self, service: Running, exporter: InMemorySpanExporter) -> None:
        self.service = service
        self._exporter = exporter

    def spans(self) -> list[ReadableSpan]:
        return list(self._exporter.get_finished_spans())

    async def last(self) -> ReadableSpan:
        """The one span, which ends a moment after its request's last byte."""
        async with asyncio.timeout(10):
            while not self.spans():
                await asyncio.sleep(0.01)
        (span,) = self.spans()
        return span


@pytest.fixture
async def traced(tmp_path: Path) -> AsyncIterator[Traced]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    launcher = ScriptedLauncher()
    launcher.launched.set()
    launcher.engine.frontend.tracing = Tracing(provider)
    folder = {"data_dir": tmp_path / "data", "min_free_bytes": 0}
    async with running(tmp_path, launcher, max_in_flight=1, **folder) as service:
        yield Traced(service, exporter)


def said(span: ReadableSpan) -> Mapping[str, Any]:
    assert span.attributes is not None
    return span.attributes


@pytest.mark.parametrize(
    ("body", "status", "code", "outcome"),
    [
        ({"do": "break"}, 500, "internal_error", ERROR),
        ({"do": "break", "stream": True}, 200, "internal_error", ERROR),
        ({"do": "crash", "stream": True}, 200, "internal_error", ERROR),
        ({"do": "refuse"}, 400, "context_length_exceeded", UNSET),
        ({"do": "refuse", "stream": True}, 400, "context_length_exceeded", UNSET),
    ],
)
async def test_an_error_has_its_code_and_a_fault_of_the_server_its_status(
    traced: Traced, body: dict[str, Any], status: int, code: str, outcome: StatusCode
) -> None:
    await traced.service.client.post(CHAT, json=body)
    span = await traced.last()
    assert (said(span)["http.response.status_code"], said(span)["error.type"]) == (status, code)
    assert span.status.status_code is outcome


async def test_a_request_that_admission_refuses_has_its_span(traced: Traced) -> None:
    client = traced.service.client
    first = asyncio.create_task(client.post(CHAT, json={"do": "wait"}))
    await traced.service.until("rbln_admission_in_flight")
    assert (await client.post(CHAT, json={"do": "answer"})).status_code == 429
    span = await traced.last()
    assert said(span)["http.response.status_code"] == 429
    assert said(span)["error.type"] == "overloaded"
    assert (said(span)["rbln_serve.outcome"], span.status.status_code) == ("rejected", UNSET)
    traced.service.frontend.go_on.set()
    await first
    while len(traced.spans()) < 2:
        await asyncio.sleep(0.01)


async def test_tokens_are_said_where_the_engine_had_a_request(traced: Traced) -> None:
    await traced.service.client.post(CHAT, json={"do": "answer", "uses": [7, 3]})
    attributes = said(await traced.last())
    usage = {name: value for name, value in attributes.items() if "usage" in name}
    assert usage == {
        "gen_ai.usage.input_tokens": 7,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 0,
    }


@pytest.mark.parametrize(
    ("host", "address", "port"),
    [
        ("model.example:8443", "model.example", 8443),
        ("model.example", "model.example", 80),
        ("[::1]:99", "::1", 99),
        ("a:b:c", "127.0.0.1", None),
        ("h" * 400, "h" * 256, 80),
    ],
)
async def test_the_address_is_the_one_that_the_client_used(
    traced: Traced, host: str, address: str, port: int | None
) -> None:
    await traced.service.client.post(CHAT, json={"do": "answer"}, headers={"host": host})
    attributes = said(await traced.last())
    assert attributes["server.address"] == address
    assert attributes["server.port"] == (port or traced.service.port)


async def test_texts_of_clients_are_bounded_and_queries_are_left_out(traced: Traced) -> None:
    headers = {"user-agent": "u" * 5000}
    path = f"{CHAT}?key=secret"
    await traced.service.client.post(path, json={"do": "answer"}, headers=headers)
    attributes = said(await traced.last())
    assert attributes["url.path"] == CHAT
    assert max(len(str(value)) for value in attributes.values()) == 256
    assert "secret" not in str(dict(attributes))


async def test_an_unknown_method_makes_no_new_name(traced: Traced) -> None:
    await traced.service.client.request("PROPFIND", "/v1/models")
    span = await traced.last()
    assert span.name == "HTTP /v1/models"
    assert said(span)["http.request.method"] == "_OTHER"
    assert said(span)["http.request.method_original"] == "PROPFIND"


async def test_a_background_response_has_a_span_of_its_own_kind(traced: Traced) -> None:
    body = {"input": "hi", "background": True, "store": True, "model": "scripted"}
    await traced.service.client.post("/v1/responses", json=body)
    async with asyncio.timeout(10):
        while len(traced.spans()) < 2:
            await asyncio.sleep(0.01)
    received, made = sorted(traced.spans(), key=lambda span: span.kind is not SpanKind.SERVER)
    assert said(received)["http.route"] == "/v1/responses"
    assert made.kind is SpanKind.INTERNAL
    assert not [name for name in said(made) if name.startswith(("http.resp", "url.", "server."))]
    assert said(made)["gen_ai.operation.name"] == "chat"


async def test_what_needs_no_engine_has_no_span(traced: Traced) -> None:
    for path in ("/livez", "/readyz", "/metrics", "/v1/server_info", "/", "/v1/files", "/nope"):
        await traced.service.client.get(path)
    await traced.service.client.get("/v1/models")
    assert (await traced.last()).name == "GET /v1/models"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "rbln-serve"),
        ({"OTEL_SERVICE_NAME": "mine"}, "mine"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b,service.name=mine"}, None),
        ({"OTEL_RESOURCE_ATTRIBUTES": "a=b"}, "rbln-serve"),
    ],
)
def test_a_service_name_that_was_given_stays(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, str], name: str | None
) -> None:
    import os

    for variable in ("OTEL_SERVICE_NAME", "OTEL_RESOURCE_ATTRIBUTES"):
        monkeypatch.delenv(variable, raising=False)
        if variable in given:
            monkeypatch.setenv(variable, given[variable])
    export_service_name()
    assert os.environ.get("OTEL_SERVICE_NAME") == name
    monkeypatch.delenv("OTEL_SERVICE_NAME", raising=False)
