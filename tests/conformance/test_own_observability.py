"""What this server says of a request elsewhere: its log line, the usage of its key."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.conformance.own_server import ADMIN_KEY, API_KEY
from tests.conformance.target import Target

pytestmark = pytest.mark.engine

CHAT = "/v1/chat/completions"


@pytest.fixture(autouse=True)
def only_ours(target: Target) -> None:
    if not target.ours:
        pytest.skip("only of this server")


def body(**more: Any) -> dict[str, Any]:
    wish = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    return {**wish, "ignore_eos": True, **more}


def log_line(target: Target, request_id: str) -> dict[str, Any]:
    """The line that says how a request ended."""
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
        answer = http.post(CHAT, json=body(), headers={"x-request-id": "logged-1"})
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
    wish = body(max_tokens=400, stream=True, n=n, temperature=1)
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
        (CHAT, body(n=2, temperature=1)),
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
