"""Limits at the edge, over a scripted engine: permits, bodies, deadlines, and what clients see."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.scripted import Running, running

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


async def fill(service: Running, number: int, **body: object) -> list[asyncio.Task[httpx.Response]]:
    """Start requests that wait, and return once they all hold their permits."""
    before = await service.metric("rbln_admission_in_flight")
    tasks = [
        asyncio.create_task(service.client.post(CHAT, json={"do": "wait", **body}))
        for _ in range(number)
    ]
    weight = int(body.get("n", 1))  # type: ignore[call-overload]
    while await service.metric("rbln_admission_in_flight") < before + number * weight:
        await asyncio.sleep(0.01)
    return tasks


async def refused(service: Running, **body: object) -> httpx.Response:
    answer = await service.client.post(CHAT, json={"do": "answer", **body})
    assert answer.status_code == 429, answer.text
    assert answer.json()["error"]["code"] == "overloaded"
    assert answer.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(answer.headers["retry-after"]) <= 60
    assert 1000 <= int(answer.headers["retry-after-ms"]) <= 60_000
    return answer


@pytest.mark.parametrize("stream", [False, True])
async def test_rejections_above_the_limit_say_when_to_retry(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path, max_in_flight=3) as service:
        held = await fill(service, 3, stream=stream)
        answer = await refused(service)
        assert "at most 3 may (--max-in-flight)" in answer.json()["error"]["message"]
        # Nothing of the body was looked at, and nothing but requests for the engine is refused.
        broken = await service.client.post(CHAT, content=b"{", headers=JSON)
        assert broken.status_code == 429
        assert (await service.client.get("/v1/models")).status_code == 200
        assert (await service.client.get("/readyz")).status_code == 200
        service.frontend.go_on.set()
        assert [answer.status_code for answer in await asyncio.gather(*held)] == [200] * 3
        assert await service.metric("rbln_admission_in_flight") == 0
        reasons = 'rbln_admission_rejections_total{reason="in_flight"}'
        assert await service.metric(reasons) == 2
        assert await service.metric("rbln_admission_max_in_flight") == 3
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200


async def test_every_answer_of_n_counts(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_flight=4) as service:
        held = await fill(service, 1, n=3)
        await refused(service, n=2)
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200
        service.frontend.go_on.set()
        await asyncio.gather(*held)
        assert await service.metric("rbln_admission_in_flight") == 0


WAYS_OUT: list[tuple[bytes, int]] = [
    (b'{"do":"answer"}', 200),
    (b'{"do":"answer","stream":true}', 200),
    (b'{"do":"refuse"}', 400),
    (b'{"do":"refuse","stream":true}', 400),
    (b'{"do":"break"}', 500),
    (b'{"do":"break","stream":true}', 200),
    (b"{", 400),
    (b"[]", 400),
]


async def test_permits_come_back_on_every_way_out(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_flight=1) as service:
        for content, status in WAYS_OUT * 2:
            answer = await service.client.post(CHAT, content=content, headers=JSON)
            assert answer.status_code == status, content
            assert await service.metric("rbln_admission_in_flight") == 0
        for stream in (False, True):
            (held,) = await fill(service, 1, stream=stream)
            held.cancel()
            while await service.metric("rbln_admission_in_flight"):
                await asyncio.sleep(0.01)
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200


async def send_half(service: Running) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Send a head and the beginning of a body, and return once the server waits for the rest."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    writer.write(
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: 100\r\n\r\n{" % CHAT.encode()
    )
    await writer.drain()
    while await service.metric("rbln_serve_in_flight_requests") < 1:
        await asyncio.sleep(0.01)
    return reader, writer


async def test_a_slow_body_holds_no_permit_and_times_out(tmp_path: Path) -> None:
    async with running(tmp_path, max_in_flight=1, body_timeout_s=0.5) as service:
        reader, writer = await send_half(service)
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200
        # The server closes: the rest of the body would be taken for the next request.
        head, _, body = (await asyncio.wait_for(reader.read(), 10)).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ")
        error = json.loads(body)["error"]
        assert error["code"] == "body_timeout"
        assert "within 0.5 s." in error["message"]
        writer.close()


async def test_a_client_that_goes_while_it_sends_is_no_fault(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        _, writer = await send_half(service)
        writer.close()
        while await service.metric("rbln_serve_in_flight_requests"):
            await asyncio.sleep(0.01)
        counted = 'rbln_http_requests_total{code="499",method="POST",outcome="aborted"'
        assert await service.metric(counted) == 1


async def test_a_body_that_says_it_is_too_large_is_not_read(tmp_path: Path) -> None:
    async with running(tmp_path, max_body_bytes=2000) as service:
        answer = await service.client.post(CHAT, content=b" " * 2001, headers=JSON)
        assert answer.status_code == 413
        assert "2000 bytes (--max-body-bytes)" in answer.json()["error"]["message"]


def nested(depth: int) -> bytes:
    """A body with ``depth`` containers inside each other."""
    lists = depth - 1
    return b'{"do":"answer","x":' + b"[" * lists + b"]" * lists + b"}"


async def test_deep_bodies_are_refused(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        service.frontend.max_json_depth = 10
        for content, status in [
            (nested(10), 200),
            (nested(11), 400),
            (b'{"do":"answer","x":"' + b"[" * 500 + b'"}', 200),
            (b'{"do":"answer","x":[' + b"[]," * 500 + b"[]]}", 200),
            (b'{"x":{"y":' * 8 + b"1" + b"}}" * 8, 400),
        ]:
            answer = await service.client.post(CHAT, content=content, headers=JSON)
            assert answer.status_code == status, content[:40]
        error = answer.json()["error"]
        assert error["code"] == "invalid_json"
        assert "the limit of 10." in error["message"]


DEADLINES: list[tuple[dict[str, Any], dict[str, str], str]] = [
    ({}, {"X-Request-Timeout-Ms": "200"}, "0.2 s, the limit of X-Request-Timeout-Ms"),
    ({"max_request_s": 0.2}, {}, "0.2 s, the limit of --max-request-s"),
    (
        {"max_request_s": 0.2},
        {"X-Request-Timeout-Ms": "60000"},
        "0.2 s, the limit of --max-request-s",
    ),
    (
        {"max_request_s": 60},
        {"X-Request-Timeout-Ms": "200"},
        "0.2 s, the limit of X-Request-Timeout-Ms",
    ),
]


@pytest.mark.parametrize(("settings", "headers", "words"), DEADLINES)
async def test_a_deadline_before_the_first_byte_is_a_504(
    tmp_path: Path, settings: dict[str, Any], headers: dict[str, str], words: str
) -> None:
    async with running(tmp_path, **settings) as service:
        answer = await service.client.post(CHAT, json={"do": "wait"}, headers=headers)
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"
        assert words in answer.json()["error"]["message"]
        assert answer.headers["x-should-retry"] == "false"
        assert service.frontend.ended == ["answer aborted"]
        counted = 'rbln_http_requests_total{code="504",method="POST",outcome="timeout"'
        assert await service.metric(counted) == 1
        assert await service.metric("rbln_admission_in_flight") == 0


async def test_a_deadline_within_a_stream_ends_it_with_a_frame(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(
            CHAT, json={"do": "wait", "stream": True}, headers={"X-Request-Timeout-Ms": "200"}
        )
        assert answer.status_code == 200
        first, error, done, rest = answer.text.split("\n\n")
        assert first == "data: first"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "deadline_exceeded"
        assert (done, rest) == ("data: [DONE]", "")
        assert service.frontend.ended == ["stream aborted"]
        counted = 'rbln_http_requests_total{code="200",method="POST",outcome="timeout"'
        assert await service.metric(counted) == 1


@pytest.mark.parametrize("value", ["0", "-5", "1.5", "soon", "", "9" * 13, "²"])
async def test_a_timeout_must_be_a_positive_integer(tmp_path: Path, value: str) -> None:
    async with running(tmp_path) as service:
        headers = {b"X-Request-Timeout-Ms": value.encode("latin-1")}
        answer = await service.client.post(CHAT, json={"do": "answer"}, headers=headers)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == "invalid_value"
        assert answer.json()["error"]["param"] == "X-Request-Timeout-Ms"


async def test_a_request_within_its_time_is_not_disturbed(tmp_path: Path) -> None:
    async with running(tmp_path, max_request_s=30) as service:
        for stream in (False, True):
            answer = await service.client.post(
                CHAT,
                json={"do": "answer", "stream": stream},
                headers={"X-Request-Timeout-Ms": "20000"},
            )
            assert answer.status_code == 200
