"""A stream has the same text where its frames are pushed and where each passes every layer."""

from __future__ import annotations

import json
import re
import socket
from typing import Any
from urllib.parse import urlsplit

import pytest

from tests.conformance.target import Target
from tests.conformance.test_own_observability import log_line

pytestmark = pytest.mark.engine

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
HI = {"messages": [{"role": "user", "content": "hi"}]}
ODD = {"temperature": 1.9, "seed": 5, "max_tokens": 120, "ignore_eos": True}
USAGE = {"stream_options": {"include_usage": True}}


@pytest.fixture(autouse=True)
def only_ours(target: Target) -> None:
    if not target.ours:
        pytest.skip("only of this server")


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
