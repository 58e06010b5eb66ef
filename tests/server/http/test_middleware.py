"""The HTTP layer of every request: ids, envelopes, limits, streams, disconnects, counts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from tests.server.scripted import Running, running

CHAT = "/v1/chat/completions"
JSON = {"content-type": "application/json"}


def error_of(answer: httpx.Response) -> dict[str, object]:
    error: dict[str, object] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    return error


async def test_a_harmless_request_id_is_used_and_echoed(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(
            CHAT, json={"do": "answer"}, headers={"X-Request-Id": "abc-1.2:3_4"}
        )
        assert answer.headers["x-request-id"] == "abc-1.2:3_4"
        assert service.frontend.headers["x-request-id"] == "abc-1.2:3_4"


@pytest.mark.parametrize("given", ["", "a b", "a\tb", "x" * 129, "é", "a;b"])
async def test_a_harmful_request_id_is_replaced(tmp_path: Path, given: str) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(
            CHAT, json={"do": "answer"}, headers={"X-Request-Id": given.encode("latin-1")}
        )
        made = answer.headers["x-request-id"]
        assert made != given
        assert len(made) == 32
        assert service.frontend.headers["x-request-id"] == made


async def test_errors_of_routing_and_bodies_have_the_envelope(tmp_path: Path) -> None:
    async with running(tmp_path, max_body_bytes=1024) as service:
        client = service.client
        for answer, status, code in [
            (await client.get("/nope"), 404, "route_not_found"),
            (await client.get(CHAT), 405, "method_not_allowed"),
            (await client.post("/livez"), 405, "method_not_allowed"),
            (await client.get("/v1/models/other"), 404, "model_not_found"),
            (await client.post(CHAT, content=b"a=1"), 415, "unsupported_media_type"),
            (await client.post(CHAT, content=b"{", headers=JSON), 400, "invalid_json"),
            (await client.post(CHAT, content=b"[1]", headers=JSON), 400, "invalid_json"),
            (await client.post(CHAT, content=b'{"a":NaN}', headers=JSON), 400, "invalid_json"),
            (await client.post(CHAT, content=b"[" * 500, headers=JSON), 400, "invalid_json"),
            (await client.post(CHAT, content=b'"\xff"', headers=JSON), 400, "invalid_json"),
            (await client.post(CHAT, content=b"[" * 2000, headers=JSON), 413, "body_too_large"),
        ]:
            assert answer.status_code == status, answer.text
            assert error_of(answer)["code"] == code
            assert answer.headers["x-request-id"]
        assert (await client.get(CHAT)).headers["allow"] == "POST"


async def test_a_body_without_length_is_cut_off_at_the_limit(tmp_path: Path) -> None:
    async def endless() -> object:
        for _ in range(1000):
            yield b" " * 1000

    async with running(tmp_path, max_body_bytes=2000) as service:
        answer = await service.client.post(CHAT, content=endless(), headers=JSON)
        assert answer.status_code == 413
        assert "2000 bytes" in str(error_of(answer)["message"])


async def test_faults_are_500_without_details(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(CHAT, json={"do": "break"})
        assert answer.status_code == 500
        assert error_of(answer)["code"] == "internal_error"
        assert "secret" not in answer.text
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200


async def test_a_fault_of_a_middleware_has_the_envelope(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as service:
        monkeypatch.setattr("server.http.middleware.RequestRecord", None)
        answer = await service.client.post(CHAT, json={"do": "answer"})
        assert (answer.status_code, error_of(answer)["code"]) == (500, "internal_error")
        assert answer.headers["x-request-id"]


async def test_anthropic_routes_answer_in_anthropics_form(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post("/v1/messages", json={"do": "refuse"})
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["code"] == "context_length_exceeded"


async def test_stream_headers_and_frames(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(CHAT, json={"do": "answer", "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.text == "data: first\n\ndata: [DONE]\n\n"


async def test_an_error_before_the_first_frame_has_its_own_status(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(CHAT, json={"do": "refuse", "stream": True})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "messages"


@pytest.mark.parametrize("fault", ["break", "crash"])
async def test_an_error_inside_a_stream_ends_it_with_a_frame(tmp_path: Path, fault: str) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(CHAT, json={"do": fault, "stream": True})
        assert answer.status_code == 200
        first, error, done, rest = answer.text.split("\n\n")
        assert first == "data: first"
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == "internal_error"
        assert (done, rest) == ("data: [DONE]", "")
        assert "secret" not in answer.text
        counted = 'rbln_http_requests_total{code="200",method="POST",outcome="server_error"'
        assert await service.metric(counted) == 1


async def drop(service: Running, body: dict[str, object], *, read: bool) -> None:
    """Send a request over a bare socket and close it, after the first bytes when `read`."""
    reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
    content = json.dumps(body).encode()
    writer.write(
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%s" % (CHAT.encode(), len(content), content)
    )
    await writer.drain()
    if read:
        await reader.readuntil(b"data: first")
    else:
        while await service.metric("rbln_serve_in_flight_requests") < 1:
            await asyncio.sleep(0.01)
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_goes_away_aborts_its_request(tmp_path: Path, stream: bool) -> None:
    async with running(tmp_path) as service:
        await drop(service, {"do": "wait", "stream": stream}, read=stream)
        for _ in range(200):
            if service.frontend.ended:
                break
            await asyncio.sleep(0.01)
        assert service.frontend.ended == ["stream aborted" if stream else "answer aborted"]
        assert await service.metric("rbln_serve_in_flight_requests") == 0
        page = (await service.client.get("/metrics")).text
        assert 'outcome="aborted",route="/v1/chat/completions"} 1.0' in page


async def test_a_client_that_goes_before_the_first_frame_aborts_too(tmp_path: Path) -> None:
    async with running(tmp_path, stream_commit_s=0) as service:
        request = asyncio.create_task(
            service.client.post(CHAT, json={"do": "wait", "stream": True})
        )
        while await service.metric("rbln_serve_in_flight_requests") < 1:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.05)
        request.cancel()
        while not service.frontend.ended:
            await asyncio.sleep(0.01)
        assert service.frontend.ended == ["stream aborted"]


async def test_labels_are_bounded(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        for index, method in enumerate(("LOCK", "MOVE", "COPY", "MKCOL", "PROPFIND")):
            await service.client.get(f"/nope/{index}")
            await service.client.request(method, CHAT)
            await service.client.get(f"/v1/models/m{index}")
        page = (await service.client.get("/metrics")).text
        lines = [x for x in page.splitlines() if x.startswith("rbln_http_requests_total{")]
        assert sum('route="other"' in line for line in lines) == 1
        assert sum('method="other"' in line for line in lines) == 1
        assert sum('route="/v1/models/{model}"' in line for line in lines) == 1
