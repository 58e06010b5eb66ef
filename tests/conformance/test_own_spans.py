"""The spans of requests, as a collector gets them: names, attributes, parents, status, end."""

import json
import re
import secrets
import socket
import time
from http.client import HTTPConnection
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.semconv.attributes import (
    error_attributes,
    http_attributes,
    network_attributes,
    server_attributes,
    url_attributes,
    user_agent_attributes,
)

from server import __version__
from tests.conformance.collector import attributes
from tests.conformance.own_server import ADMIN_KEY, API_KEY
from tests.conformance.target import Target

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a secret of the prompt"}]
PARENT = "b7ad6b7169203331"
_OWN = {"rbln_serve.outcome", "rbln_serve.key", "http.request.header.x-request-id"}
_ENGINE = "gen_ai.latency."


@pytest.fixture(autouse=True)
def only_ours(target: Target) -> None:
    if not target.ours:
        pytest.skip("only of this server")


def chat(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, "max_tokens": 5, "ignore_eos": True, **more}


THREE = {"max_tokens": 3, "ignore_eos": True}
RESPOND = {"input": "hi", "max_output_tokens": 3, "ignore_eos": True}
ANTHROPIC = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3}


class Traced:
    """A request in a trace of its own, which `headers` name."""

    def __init__(self, target: Target) -> None:
        assert target.collector is not None
        self.trace = secrets.token_hex(16)
        self.headers = {"traceparent": f"00-{self.trace}-{PARENT}-01"}
        self._collector = target.collector

    def spans(self, engine: int) -> tuple[Any, list[Any]]:
        """Return the request's span and those of the engine, once all have come."""
        found = self._collector.wait_for(self.trace, 1 + engine)
        ours = [span for span in found if span.parent_span_id.hex() == PARENT]
        assert len(ours) == 1
        below = [span for span in found if span.parent_span_id == ours[0].span_id]
        assert len(found) == 1 + len(below) == 1 + engine
        assert {span.name for span in below} <= {"llm_request"}
        return ours[0], below


def ask(target: Target, path: str, body: dict[str, Any], engine: int = 1) -> tuple[Any, list[Any]]:
    """Return the spans of a request that is read to its end."""
    traced = Traced(target)
    with target.http() as http:
        http.post(path, json=body, headers=traced.headers)
    return traced.spans(engine)


def known_names() -> set[str]:
    """Every attribute that the installed semantic conventions define."""
    modules = (
        gen_ai_attributes,
        error_attributes,
        http_attributes,
        network_attributes,
        server_attributes,
        url_attributes,
        user_agent_attributes,
    )
    return {
        value for module in modules for value in vars(module).values() if isinstance(value, str)
    }


def test_a_chat_has_the_names_of_the_conventions(target: Target) -> None:
    traced = Traced(target)
    headers = traced.headers | {"x-request-id": "traced-1", "user-agent": "tests/1"}
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "seed": 3, "stop": ["a secret stop"]}
    with target.http() as http:
        answer = http.post(CHAT, json=chat(**settings), headers=headers)
    assert answer.status_code == 200
    ours, (engine,) = traced.spans(engine=1)
    assert (ours.name, ours.kind) == ("chat tiny", Span.SpanKind.SPAN_KIND_SERVER)
    assert ours.status.code == Status.StatusCode.STATUS_CODE_UNSET
    usage = answer.json()["usage"]
    said = attributes(ours)
    assert said == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "rbln_serve",
        "gen_ai.request.model": "tiny",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.request.top_k": 7,
        "gen_ai.request.seed": 3,
        "gen_ai.response.model": "tiny",
        "gen_ai.response.id": "chatcmpl-traced-1",
        "gen_ai.response.finish_reasons": ["length"],
        "gen_ai.usage.input_tokens": usage["prompt_tokens"],
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": said["gen_ai.usage.cache_read.input_tokens"],
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "http.route": CHAT,
        "http.request.header.x-request-id": ["traced-1"],
        "network.protocol.version": "1.1",
        "server.address": httpx.URL(target.base_url).host,
        "server.port": httpx.URL(target.base_url).port,
        "url.path": CHAT,
        "url.scheme": "http",
        "user_agent.original": "tests/1",
        "rbln_serve.outcome": "ok",
        "rbln_serve.key": "suite",
    }
    assert said.keys() - _OWN <= known_names()
    assert (engine.name, engine.kind) == ("llm_request", Span.SpanKind.SPAN_KIND_INTERNAL)
    below = attributes(engine)
    assert below["gen_ai.request.id"] == "chatcmpl-traced-1"
    assert below["gen_ai.usage.output_tokens"] == 5
    assert below["gen_ai.response.finish_reasons"] == ["length"]
    stages = {name.removeprefix(_ENGINE) for name in below if name.startswith(_ENGINE)}
    assert stages >= {"time_in_queue", "time_to_first_token", "time_in_model_decode", "e2e"}
    assert "secret" not in json.dumps([said, below])


def test_what_recorded_a_span_is_named_with_version_and_schema(target: Target) -> None:
    ours, _ = ask(target, CHAT, chat())
    assert target.collector is not None
    schema = "https://opentelemetry.io/schemas/1.41.1"
    assert target.collector.scopes[ours.span_id] == ("rbln_serve", __version__, schema)
    assert target.collector.services == {"rbln-serve"}
    # The self-test at the start is no client's request.
    roots = [span.name for span in target.collector.spans if not span.parent_span_id]
    assert "llm_request" not in roots


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "body", "operation", "prefix", "reason"),
    [
        (CHAT, chat(), "chat", "chatcmpl-", "length"),
        ("/v1/completions", {"prompt": "a b", **THREE}, "text_completion", "cmpl-", "length"),
        ("/v1/responses", RESPOND, "chat", "resp_", "max_output_tokens"),
        ("/v1/messages", ANTHROPIC, "chat", "msg_", "max_tokens"),
    ],
)
def test_every_api_has_its_answer_in_the_span(
    target: Target,
    path: str,
    body: dict[str, Any],
    operation: str,
    prefix: str,
    reason: str,
    stream: bool,
) -> None:
    ours, _ = ask(target, path, body | ({"stream": True} if stream else {}))
    said = attributes(ours)
    assert ours.name == f"{operation} tiny"
    assert said["gen_ai.operation.name"] == operation
    assert said["gen_ai.response.id"].startswith(prefix)
    assert said["gen_ai.response.finish_reasons"] == [reason]
    assert said["gen_ai.usage.output_tokens"] == 3 if "max_tokens" not in body else True
    assert said.get("gen_ai.request.stream", False) is stream


def test_each_sequence_has_a_span_below_the_requests(target: Target) -> None:
    ours, engine = ask(target, CHAT, chat(n=2, temperature=1), engine=2)
    assert attributes(ours)["gen_ai.request.choice.count"] == 2
    assert attributes(ours)["gen_ai.usage.output_tokens"] == 10
    assert attributes(ours)["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert [attributes(span)["gen_ai.usage.output_tokens"] for span in engine] == [5, 5]
    _, engine = ask(target, "/v1/completions", {"prompt": ["a", "b c"], "max_tokens": 2}, engine=2)
    assert len(engine) == 2


def test_a_stop_string_is_a_stop(target: Target) -> None:
    with target.http() as http:
        body = {"prompt": "a b c", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        text = http.post("/v1/completions", json=body).json()["choices"][0]["text"]
    ours, (engine,) = ask(target, "/v1/completions", body | {"stop": [text[3:6]]})
    for span in (ours, engine):
        assert attributes(span)["gen_ai.response.finish_reasons"] == ["stop"]


def leave(target: Target, body: dict[str, Any], headers: dict[str, str]) -> None:
    """Close the connection of a chat while the engine makes its answer."""
    address = httpx.URL(target.base_url)
    connection = HTTPConnection(str(address.host), address.port, timeout=60)
    every = target.headers | headers | {"content-type": "application/json"}
    connection.request("POST", CHAT, json.dumps(body), every)
    with target.http() as http:
        while not re.search(r"num_requests_running\{.*\} [1-9]", http.get("/metrics").text):
            time.sleep(0.005)
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_its_client_leaves_has_its_spans(target: Target, stream: bool) -> None:
    for _ in range(8):
        traced = Traced(target)
        leave(target, chat(max_tokens=480, stream=stream, n=2, temperature=1), traced.headers)
        ours, engine = traced.spans(engine=2)
        said = attributes(ours)
        # A fast engine may have ended before the gauge shows it running, up to 0.1 s later.
        if said["rbln_serve.outcome"] != "ok":
            break
    assert (ours.name, said["rbln_serve.outcome"]) == ("chat tiny", "aborted")
    assert said["error.type"] == "aborted"
    # The client's doing, not the server's.
    assert ours.status.code == Status.StatusCode.STATUS_CODE_UNSET
    assert said["http.response.status_code"] == (200 if stream else 499)
    assert said["gen_ai.usage.output_tokens"] < 2 * 480
    for span in engine:
        assert attributes(span)["gen_ai.response.finish_reasons"] == ["abort"]
        assert span.end_time_unix_nano <= ours.end_time_unix_nano


@pytest.mark.parametrize(
    ("headers", "body", "status", "code"),
    [
        ({}, chat(temperature=-1), 400, "invalid_value"),
        ({}, chat(temperature="a secret"), 400, "invalid_type"),
        ({}, chat(model="unknown"), 404, "model_not_found"),
        ({"authorization": "Bearer wrong"}, chat(), 401, "invalid_api_key"),
    ],
)
def test_a_request_that_is_refused_has_its_span(
    target: Target, headers: dict[str, str], body: dict[str, Any], status: int, code: str
) -> None:
    traced = Traced(target)
    with target.http() as http:
        answer = http.post(CHAT, json=body, headers=traced.headers | headers)
    assert answer.status_code == status
    ours, _ = traced.spans(engine=0)
    said = attributes(ours)
    assert ours.name.split()[0] == said["gen_ai.operation.name"] == "chat"
    assert (said["http.response.status_code"], said["error.type"]) == (status, code)
    assert ours.status.code == Status.StatusCode.STATUS_CODE_UNSET
    assert "gen_ai.usage.input_tokens" not in said
    assert "secret" not in json.dumps(said)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_is_the_servers_error(target: Target, stream: bool) -> None:
    # A busy machine has no first token of a stream in 60 ms.
    for milliseconds in (60, 240, 960):
        traced = Traced(target)
        headers = traced.headers | {"x-request-timeout-ms": str(milliseconds)}
        with target.http() as http:
            http.post(CHAT, json=chat(max_tokens=480, stream=stream), headers=headers)
        ours, (engine,) = traced.spans(engine=1)
        said = attributes(ours)
        if (status := said["http.response.status_code"]) == (200 if stream else 504):
            break
    assert status == (200 if stream else 504)
    assert (said["error.type"], said["rbln_serve.outcome"]) == ("deadline_exceeded", "timeout")
    assert ours.status.code == Status.StatusCode.STATUS_CODE_ERROR
    assert attributes(engine)["gen_ai.response.finish_reasons"] == ["abort"]


def test_the_span_of_a_stream_ends_with_its_last_byte(target: Target) -> None:
    traced = Traced(target)
    body = chat(max_tokens=60, stream=True)
    with (
        target.http() as http,
        http.stream("POST", CHAT, json=body, headers=traced.headers) as answer,
    ):
        arrived = [time.time_ns() for line in answer.iter_lines() if line]
    ours, _ = traced.spans(engine=1)
    assert ours.start_time_unix_nano < arrived[0] < ours.end_time_unix_nano
    # Of all but the last lines it can be said for sure that they came before.
    assert arrived[len(arrived) // 2] < ours.end_time_unix_nano


def test_a_route_without_the_model_has_a_span_of_http(target: Target) -> None:
    ours, _ = ask(target, "/tokenize", {"prompt": "hi"}, engine=0)
    said = attributes(ours)
    assert (ours.name, said["http.route"]) == ("POST /tokenize", "/tokenize")
    assert not [name for name in said if name.startswith("gen_ai.")]


# -------------------------------------------------------------------------------- own observability
def log_line(target: Target, request_id: str) -> dict[str, Any]:
    assert target.log is not None
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for line in target.log.read_text(encoding="utf-8").splitlines():
            if request_id in line and '"outcome"' in line:
                found: dict[str, Any] = json.loads(line)
                return found
        time.sleep(0.05)
    raise TimeoutError(request_id)


def test_the_log_line_of_a_request_is_an_object(target: Target) -> None:
    with target.http() as http:
        answer = http.post(CHAT, json=chat(), headers={"x-request-id": "logged-1"})
    usage = answer.json()["usage"]
    line = log_line(target, "logged-1")
    seconds = line.pop("seconds")
    assert 0 < seconds < 60
    for name in ("time", "message", "logger"):
        line.pop(name)
    assert line == {
        "level": "info",
        "request_id": "logged-1",
        "method": "POST",
        "route": CHAT,
        "code": 200,
        "outcome": "ok",
        "stream": False,
        "bytes": len(answer.content),
        "prompt_tokens": usage["prompt_tokens"],
        "completion_tokens": 5,
        "key": "suite",
    }


@pytest.mark.parametrize("n", [1, 2])
def test_tokens_of_a_stream_that_was_left_are_counted(target: Target, n: int) -> None:
    name = f"left-{n}"
    wish = chat(max_tokens=400, stream=True, n=n, temperature=1)
    with (
        target.http() as http,
        http.stream("POST", CHAT, json=wish, headers={"x-request-id": name}) as answer,
    ):
        lines = answer.iter_lines()
        for _ in range(12):
            next(lines)
    line = log_line(target, name)
    assert (line["outcome"], line["stream"]) == ("aborted", True)
    assert line["prompt_tokens"] > 0
    assert 3 <= line["completion_tokens"] < 400 * n


@pytest.mark.parametrize(
    ("path", "wish"),
    [
        (CHAT, chat(n=2, temperature=1)),
        ("/v1/completions", {"prompt": ["a b", "c d e"], "max_tokens": 3}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
    ],
)
def test_the_keys_usage_is_what_the_answers_say(
    target: Target, path: str, wish: dict[str, Any]
) -> None:
    def counted() -> list[float]:
        with target.http() as http:
            page = http.get("/metrics").text
        starts = [
            f'rbln_key_tokens_total{{key="suite",kind="{kind}"}}'
            for kind in ("prompt", "completion")
        ]
        return [
            sum(float(line.split()[-1]) for line in page.splitlines() if line.startswith(start))
            for start in starts
        ]

    before = counted()
    with target.http() as http:
        usage = http.post(path, json=wish).json()["usage"]
    after = counted()
    prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
    completion = usage.get("completion_tokens", usage.get("output_tokens"))
    assert [b - a for a, b in zip(before, after, strict=True)] == [prompt, completion]


def test_keys_are_nowhere_to_be_read(target: Target) -> None:
    assert target.log is not None
    with target.http() as http:
        texts = [http.get(path).text for path in ("/v1/server_info", "/metrics", "/openapi.json")]
    for text in (*texts, target.log.read_text(encoding="utf-8")):
        assert API_KEY not in text
        assert ADMIN_KEY not in text


# -------------------------------------------------------------------------------------- own streams
COMPLETION = "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
ODD = {"temperature": 1.9, "seed": 5, "max_tokens": 120, "ignore_eos": True}
USAGE = {"stream_options": {"include_usage": True}}


def stream(target: Target, path: str, body: dict[str, Any], version: str, name: str) -> bytes:
    """Return the body of a raw response; HTTP/1.0 has no chunks, so nothing is pushed there."""
    place = urlsplit(target.base_url)
    # A prompt that is cached would have another usage.
    body = {"model": "tiny", "stream": True, "cache_salt": name, **body}
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/{version}\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {target.api_key}\r\nconnection: close\r\nx-request-id: {name}\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    with socket.create_connection((place.hostname, place.port or 0), timeout=60) as connection:
        connection.sendall(head.encode() + content)
        parts = []
        while part := connection.recv(65536):
            parts.append(part)
    answer, _, rest = b"".join(parts).partition(b"\r\n\r\n")
    assert b" 200 " in answer
    if version == "1.0":
        return rest
    frames = b""
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        frames += rest[: int(size, 16)]
        assert rest[int(size, 16) :][:2] == b"\r\n"
        rest = rest[int(size, 16) + 2 :]
    return frames


def summary(stream: bytes) -> tuple[dict[int, str], list[str], set[frozenset[str]], list[Any]]:
    """The text, ends, fields and usage of a stream; how many frames it has is left to time."""
    *frames, done, rest = stream.decode().split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    texts: dict[int, str] = {}
    ends, fields, usages = [], set(), []
    for frame in frames:
        chunk = json.loads(frame.removeprefix("data: "))
        fields.add(frozenset(chunk))
        if (usage := chunk.get("usage")) is not None:
            usages.append(usage)
        for choice in chunk["choices"]:
            text = choice.get("text", choice.get("delta", {}).get("content"))
            texts[choice["index"]] = texts.get(choice["index"], "") + text
            ends += [f"{choice['index']} {choice['finish_reason']}"] * bool(choice["finish_reason"])
    return texts, sorted(ends), fields, usages


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {**HI, **ODD, **USAGE}),
        (CHAT, {**HI, **ODD, "service_tier": "flex", "stop": ["zzz"]}),
        (COMPLETION, {"prompt": "a", **ODD, **USAGE, "echo": True}),
        (COMPLETION, {"prompt": ["a", "b"], **ODD, "n": 2}),
    ],
    ids=["chat", "chat of a tier", "completion", "several"],
)
def test_streams_of_both_versions_have_the_same_text_and_usage(
    target: Target, path: str, body: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    name = re.sub(r"\W", "-", request.node.name)
    pushed = stream(target, path, body, "1.1", f"{name}-pushed")
    passed = stream(target, path, body, "1.0", f"{name}-passed")
    assert summary(pushed) == summary(passed)
    assert log_line(target, f"{name}-pushed")["bytes"] == len(pushed)
    lines = [log_line(target, f"{name}-{way}") for way in ("pushed", "passed")]
    assert lines[0]["completion_tokens"] == lines[1]["completion_tokens"] > 0
