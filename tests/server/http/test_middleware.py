"""The HTTP layer of every request: ids, envelopes, limits, streams, disconnects, counts."""

import asyncio
import json
from pathlib import Path

import httpx
import pytest

from server.settings import SettingsError, load_settings
from tests.server.http.wire import CHAT, connected, get, post
from tests.server.scripted import Running, running

JSON = {"content-type": "application/json"}


def error_of(answer: httpx.Response) -> dict[str, object]:
    error: dict[str, object] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["code"], str)
    return error


HARMLESS = "abc-1.2:3_4"


@pytest.mark.parametrize("given", [HARMLESS, "", "a b", "a\tb", "x" * 129, "é", "a;b"])
async def test_a_request_id_is_echoed_unless_it_is_harmful(tmp_path: Path, given: str) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(
            CHAT, json={"do": "answer"}, headers={"X-Request-Id": given.encode("latin-1")}
        )
        made = answer.headers["x-request-id"]
        assert (made == given) == (given == HARMLESS)
        assert given == HARMLESS or len(made) == 32
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


async def test_stream_headers_and_frames(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(CHAT, json={"do": "answer", "stream": True})
        assert answer.headers["content-type"].startswith("text/event-stream")
        assert answer.headers["cache-control"] == "no-cache"
        assert answer.headers["x-accel-buffering"] == "no"
        assert answer.text == "data: first\n\ndata: [DONE]\n\n"


async def test_an_error_before_the_first_frame_has_its_status_and_the_apis_form(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(CHAT, json={"do": "refuse", "stream": True})
        assert answer.status_code == 400
        assert error_of(answer)["param"] == "messages"
        answer = await service.client.post("/v1/messages", json={"do": "refuse"})
        assert answer.json()["type"] == "error"
        assert answer.json()["error"]["code"] == "context_length_exceeded"


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
        await service.until("rbln_serve_in_flight_requests")
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
        await service.until("rbln_serve_in_flight_requests")
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


# --------------------------------------------------------------------------------------- http forms
STREAM = {"do": "answer", "stream": True}
FRAMES = b"data: first\n\ndata: [DONE]\n\n"
LIVE = get("/livez")


async def test_a_stream_of_http_1_0_is_not_chunked_and_ends_with_the_connection(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as service, connected(service.port) as wire:
        await wire.send(post({"do": "wait", "stream": True}, b"connection: close", version=b"1.0"))
        status, headers = await wire.head()
        assert (status, headers["connection"]) == (200, "close")
        assert "transfer-encoding" not in headers and "content-length" not in headers
        # It is a stream: the first frame comes while the second is waited for.
        assert await wire.reader.readexactly(13) == FRAMES[:13]
        service.frontend.go_on.set()
        assert await wire.closed() == FRAMES[13:]
    assert service.frontend.ended == ["stream finished"]


async def test_http_1_0_in_pieces_without_host_and_errors_of_it(tmp_path: Path) -> None:
    async with running(tmp_path, max_body_bytes=1024) as service:
        for request, status, code in [
            (post({"do": "answer"}, version=b"1.0"), 200, None),
            (b"GET /livez HTTP/1.0\r\n\r\n", 200, None),
            (get("/nope", version=b"1.0"), 404, "route_not_found"),
            (post(b"x" * 2000, version=b"1.0"), 413, "body_too_large"),
        ]:
            async with connected(service.port) as wire:
                for cut in range(0, len(request), 40):
                    await wire.send(request[cut : cut + 40])
                    await asyncio.sleep(0)
                answer = await wire.answer()
                assert (answer.status, answer.headers["connection"]) == (status, "close")
                assert code is None or answer.code == code
                assert await wire.closed() == b""
        assert await service.metric("rbln_http_connections") == 1


async def test_http_1_0_keeps_a_connection_on_request(tmp_path: Path) -> None:
    keep = b"connection: keep-alive"
    async with running(tmp_path) as service, connected(service.port) as wire:
        for request in (post({"do": "answer"}, keep, version=b"1.0"), LIVE):
            await wire.send(request + get("/livez", keep, version=b"1.0"))
            assert (await wire.answer()).status == 200
            answer = await wire.answer()
            assert (answer.status, answer.headers["connection"]) == (200, "keep-alive")
        # Between requests of HTTP/1.1, without an interim response.
        announced = (keep, b"expect: 100-continue")
        await wire.send(post({"do": "answer"}, *announced, version=b"1.0"))
        assert (await wire.answer()).headers["connection"] == "keep-alive"
        # A stream has no length, so that the connection is its end.
        await wire.send(post(STREAM, keep, version=b"1.0"))
        answer = await wire.answer()
        assert (answer.body, answer.headers["connection"]) == (FRAMES, "close")
        assert await wire.closed(1.0) == b""


async def test_a_client_of_http_1_0_that_leaves_aborts(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        async with connected(service.port) as wire:
            await wire.send(post({"do": "wait", "stream": True}, version=b"1.0"))
            await wire.head()
        async with asyncio.timeout(5):
            while service.frontend.ended != ["stream aborted"]:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (b"GET /livez HTTP/1.1\r\n\r\n", "Host: must occur once, got 0"),
        (b"GET /livez HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n", "Host: must occur once, got 2"),
        (b"GET /livez HTTP/2.0\r\nhost: a\r\n\r\n", "HTTP/2.0"),
        (b"GET /livez HTTP/0.9\r\nhost: a\r\n\r\n", "HTTP/0.9"),
        (b"nonsense\r\n\r\n", "not valid HTTP"),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "not valid HTTP"),
        (b"GET /livez HTTP/1.1\r\nhost: x\r\na\x00b: c\r\n\r\n", "not valid HTTP"),
        (b"GET /livez HTTP/1.1\r\nhost: x\r\na: b\x00c\r\n\r\n", "not valid HTTP"),
        (b"GET /livez HTTP/1.1\r\nhost: x\r\n folded: c\r\n\r\n", "not valid HTTP"),
        (b"GET /l\x00ivez HTTP/1.1\r\nhost: x\r\n\r\n", "not valid HTTP"),
        (b"GET http://[::1/livez HTTP/1.1\r\nhost: x\r\n\r\n", "HTTP"),
        (b"CONNECT x:80 HTTP/1.1\r\nhost: x\r\n\r\n", "tunnels"),
        (post(b"{}", b"content-length: 3"), "not valid HTTP"),
        (post(b"{}", b"transfer-encoding: chunked"), "not valid HTTP"),
        (get("/livez", b"transfer-encoding: gzip"), "not valid HTTP"),
        (get("/livez", b"transfer-encoding: chunked, gzip"), "not valid HTTP"),
        (get("/livez", b"transfer-encoding: chunked, chunked"), "not valid HTTP"),
        (get("/livez", b"transfer-encoding: chunked", version=b"1.0"), "not valid HTTP/1.0"),
    ],
)
async def test_what_is_no_request_gets_an_envelope_and_the_end(
    tmp_path: Path, request_: bytes, words: str
) -> None:
    async with running(tmp_path) as service, connected(service.port) as wire:
        await wire.send(request_)
        answer = await wire.answer()
        assert (answer.status, answer.code) == (400, "invalid_http")
        assert words in json.loads(answer.body)["error"]["message"]
        assert answer.headers["connection"] == "close"
        assert await wire.closed(1.0) == b""
        refused = 'rbln_http_connection_refusals_total{reason="invalid_http"}'
        assert await service.metric(refused) == 1


@pytest.mark.parametrize(
    "codings",
    [
        [b"transfer-encoding: gzip, chunked"],
        [b"Transfer-Encoding: x-one,Chunked"],
        [b"transfer-encoding: gzip", b"transfer-encoding: chunked"],
        [b"transfer-encoding: identity, chunked"],
    ],
)
async def test_a_body_with_another_transfer_coding_is_501(
    tmp_path: Path, codings: list[bytes]
) -> None:
    async with running(tmp_path) as service, connected(service.port) as wire:
        await wire.send(LIVE + get("/livez", *codings) + b'f\r\n{"do":"answer"}\r\n0\r\n\r\n')
        assert (await wire.answer()).status == 200
        answer = await wire.answer()
        assert (answer.status, answer.code) == (501, "unsupported_transfer_encoding")
        assert await wire.closed(1.0) == b""


@pytest.mark.parametrize("version", [b"1.1", b"1.0"])
async def test_a_client_that_only_ends_its_sending_side_is_answered(
    tmp_path: Path, version: bytes
) -> None:
    async with running(tmp_path) as service:
        whole = post({"do": "wait"}, version=version)
        for request in (whole, LIVE + whole if version == b"1.1" else whole):
            service.frontend.go_on.clear()
            async with connected(service.port) as wire:
                await wire.send(request)
                wire.writer.write_eof()
                await asyncio.sleep(0.3)
                service.frontend.go_on.set()
                if request != whole:
                    assert (await wire.answer()).status == 200
                answer = await wire.answer()
                assert (answer.status, json.loads(answer.body)) == (200, {"ok": True})
                assert answer.headers["connection"] == "close"
                assert await wire.closed(1.0) == b""
        if version == b"1.1":
            service.frontend.go_on.clear()
            async with connected(service.port) as wire:
                await wire.send(post({"do": "wait", "stream": True}))
                await wire.head()
                wire.writer.write_eof()
                await asyncio.sleep(0.3)
                service.frontend.go_on.set()
                assert await wire._chunks() == FRAMES
                assert await wire.closed(1.0) == b""
        assert not [ending for ending in service.frontend.ended if "aborted" in ending]


async def test_a_byte_order_mark_before_the_body_is_ignored(tmp_path: Path) -> None:
    async with running(tmp_path) as service, connected(service.port) as wire:
        await wire.send(post(b'\xef\xbb\xbf{"do": "answer"}'))
        assert json.loads((await wire.answer()).body) == {"ok": True}
        await wire.send(post(b'\xef\xbb\xbf\xef\xbb\xbf{"do": "answer"}'))
        assert (await wire.answer()).code == "invalid_json"


async def test_a_slash_behind_a_route_is_ignored(tmp_path: Path) -> None:
    async with running(tmp_path, root_path="/llm", api_key=("k",)) as service:
        client = service.client
        assert (await client.post(f"{CHAT}/", json={"do": "answer"})).status_code == 401
        client.headers["x-api-key"] = "k"
        for prefix in ("", "/llm"):
            answer = await client.post(f"{prefix}{CHAT}/?x=1", json={"do": "answer"})
            assert (answer.status_code, answer.json()) == (200, {"ok": True})
            listed = await client.get(f"{prefix}/v1/models/")
            assert listed.json()["object"] == "list"
            assert (await client.get(f"{prefix}/livez/")).status_code == 200
            assert (await client.get(f"{prefix}/v1/models/scripted/")).json()["id"] == "scripted"
            for path in ("/nope/", f"{CHAT}//"):
                assert (await client.get(f"{prefix}{path}")).status_code == 404, path
        labels = f'code="200",method="POST",outcome="ok",route="{CHAT}"'
        assert await service.metric(f"rbln_http_requests_total{{{labels}}}") == 2


async def test_a_websocket_is_refused_in_an_envelope(tmp_path: Path) -> None:
    async with running(tmp_path) as service, connected(service.port) as wire:
        offer = (b"connection: Upgrade", b"upgrade: websocket", b"sec-websocket-version: 13")
        await wire.send(get("/v1/realtime", *offer))
        answer = await wire.answer()
        assert (answer.status, answer.code) == (400, "websocket_unsupported")


async def test_an_offer_of_http_2_is_declined_and_the_request_served(tmp_path: Path) -> None:
    """As Java's client makes it, with a body that the parser would skip."""
    offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABk")
    async with running(tmp_path) as service, connected(service.port) as wire:
        for _ in range(2):
            request = post(STREAM, *offer)
            await wire.send(request[:30])
            await asyncio.sleep(0.01)
            await wire.send(request[30:])
            answer = await wire.answer()
            assert (answer.status, answer.body) == (200, FRAMES)
        await wire.send(LIVE + get("/livez", *offer))
        assert (await wire.answer()).status == 200
        # Behind another request there is no telling where it began.
        assert (await wire.answer()).code == "invalid_http"


async def test_requests_one_behind_the_other_are_answered_in_order(tmp_path: Path) -> None:
    async with running(tmp_path) as service, connected(service.port) as wire:
        await wire.send(post(STREAM) + LIVE + post({"do": "refuse"}) + LIVE[:20])
        assert (await wire.answer()).body == FRAMES
        assert (await wire.answer()).status == 200
        assert (await wire.answer()).code == "context_length_exceeded"
        await wire.send(LIVE[20:])
        assert (await wire.answer()).status == 200
        assert await service.metric("rbln_http_connections") == 2


async def test_answers_that_are_due_come_before_a_refusal(tmp_path: Path) -> None:
    async with running(tmp_path) as service, connected(service.port) as wire:
        await wire.send(post({"do": "wait", "stream": True}) + LIVE + b"nonsense\r\n\r\n")
        await wire.head()
        service.frontend.go_on.set()
        assert await wire._chunks() == FRAMES
        assert (await wire.answer()).status == 200
        assert (await wire.answer()).code == "invalid_http"
        assert await wire.closed(1.0) == b""


async def test_no_more_than_some_requests_wait_on_a_connection(tmp_path: Path) -> None:
    async with running(tmp_path) as service, connected(service.port) as wire:
        await wire.send(post({"do": "wait"}))
        await service.until("rbln_serve_in_flight_requests")
        await wire.send(LIVE * 1000)
        await asyncio.sleep(0.1)
        service.frontend.go_on.set()
        codes = [(await wire.answer()).status for _ in range(1 + 32 + 1)]
        assert codes == [200] * 33 + [400]
        assert await wire.closed(5.0) == b""


async def test_a_client_that_leaves_ends_the_request_before_the_one_it_sent_last(
    tmp_path: Path,
) -> None:
    async with running(tmp_path) as service:
        async with connected(service.port) as wire:
            await wire.send(post({"do": "wait"}) + LIVE)
            await service.until("rbln_serve_in_flight_requests")
        async with asyncio.timeout(5):
            while service.frontend.ended != ["answer aborted"]:
                await asyncio.sleep(0.01)


async def test_bodies_in_chunks_and_bodies_that_are_announced(tmp_path: Path) -> None:
    chunked = (
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n" % CHAT.encode()
    )
    async with running(tmp_path) as service, connected(service.port) as wire:
        await wire.send(chunked + b'\r\n4;x=y\r\n{"do\r\n')
        await asyncio.sleep(0.01)
        await wire.send(b'b\r\n":"answer"}\r\n\r\n'[:-2] + b"0\r\nx-late: 1\r\n\r\n" + LIVE)
        assert json.loads((await wire.answer()).body) == {"ok": True}
        assert "x-late" not in service.frontend.headers
        assert (await wire.answer()).status == 200
        # All at once, so that the fields behind the body are here before the handler runs.
        await wire.send(chunked + b'\r\nf\r\n{"do":"answer"}\r\n0\r\nx-late: 1\r\n\r\n')
        assert (await wire.answer()).status == 200
        assert "x-late" not in service.frontend.headers
        await wire.send(chunked + b"expect: 100-continue\r\n\r\n")
        assert await wire.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
        await wire.send(b'f\r\n{"do":"answer"}\r\n0\r\n\r\n')
        assert (await wire.answer()).status == 200
        # Its own body is wrong, and the handler waits for it.
        await wire.send(chunked + b"\r\nfrog\r\n")
        assert (await wire.answer()).code == "invalid_http"
        assert await wire.closed(1.0) == b""
        assert await service.metric("rbln_serve_in_flight_requests") == 0


async def test_a_line_end_too_many_does_no_harm(tmp_path: Path) -> None:
    async with running(tmp_path, header_timeout_s=0.3) as service, connected(service.port) as wire:
        await wire.send(post({"do": "answer"}) + b"\r\n")
        assert (await wire.answer()).status == 200
        await wire.send(b"\r\n")
        await asyncio.sleep(0.6)
        await wire.send(LIVE)
        assert (await wire.answer()).status == 200


async def test_head_is_get_without_a_body(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        await service.until_ready()
        client = service.client
        for path in ("/livez", "/readyz", "/v1/models", "/metrics", "/v1/server_info", "/"):
            whole, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (whole.status_code, b""), path
            assert head.headers["content-type"] == whole.headers["content-type"]
            assert head.headers.get("content-length", "0") != "0"
        missing = await client.head("/v1/models/none")
        assert (missing.status_code, missing.content) == (404, b"")
        refused = await client.head(CHAT)
        assert refused.status_code == 405
        other = await client.put("/v1/models")
        assert set(other.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize("encoding", ["gzip", "br", "GZIP, identity", "x" * 3000])
async def test_bodies_are_not_decompressed(tmp_path: Path, encoding: str) -> None:
    async with running(tmp_path, data_dir=tmp_path / "data") as service:
        await service.until_ready()
        headers = {"content-encoding": encoding, "content-type": "application/json"}
        for path in (CHAT, "/v1/files", "/admin/drain"):
            answer = await service.client.post(path, content=b"\x1f\x8b", headers=headers)
            assert answer.status_code == 415, path
            error = answer.json()["error"]
            assert error["code"] == "unsupported_content_encoding"
            assert "Content-Encoding" in error["message"] and len(error["message"]) < 300
            assert answer.headers["accept-encoding"] == "identity"
        body = json.dumps({"do": "answer"}).encode()
        plain = headers | {"content-encoding": "identity"}
        answer = await service.client.post(CHAT, content=body, headers=plain)
        assert answer.status_code == 200


# --------------------------------------------------------------------------------------------- cors
PAGE = "https://page.example"
ASK = {
    "origin": PAGE,
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


async def test_it_is_off_by_default(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.get("/v1/models", headers={"origin": PAGE})
        assert answer.status_code == 200
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert (await service.client.options(CHAT, headers=ASK)).status_code == 405


async def test_a_named_origin_may_ask_and_read_errors(tmp_path: Path) -> None:
    settings = {"allowed_origins": (PAGE,), "api_key": ("k",)}
    async with running(tmp_path, **settings) as service:
        preflight = await service.client.options(CHAT, headers=ASK)
        assert preflight.status_code == 200
        assert preflight.headers["access-control-allow-origin"] == PAGE
        assert "POST" in preflight.headers["access-control-allow-methods"]
        assert preflight.headers["x-request-id"]
        refused = await service.client.post(CHAT, json={}, headers={"origin": PAGE})
        assert refused.status_code == 401
        assert refused.headers["access-control-allow-origin"] == PAGE
        assert "x-request-id" in refused.headers["access-control-expose-headers"]
        stream = await service.client.post(
            CHAT, json={"do": "answer", "stream": True}, headers={"origin": PAGE, "x-api-key": "k"}
        )
        assert stream.headers["access-control-allow-origin"] == PAGE
        other = await service.client.options(CHAT, headers={**ASK, "origin": "https://evil"})
        assert other.status_code == 400
        assert "access-control-allow-origin" not in other.headers
        error = other.json()["error"]
        assert (error["code"], error["type"]) == ("origin_refused", "invalid_request_error")
        assert "refused for its: origin " in error["message"]
        assert other.headers["x-request-id"] and other.headers["vary"].startswith("Origin")
        asked = {**ASK, "access-control-request-method": "PURGE"}
        answer = await service.client.options("/v1/messages", headers=asked)
        assert answer.json()["type"] == "error"
        assert "refused for its: method " in answer.json()["error"]["message"]


async def test_any_origin(tmp_path: Path) -> None:
    async with running(tmp_path, allowed_origins=("*",)) as service:
        answer = await service.client.get("/v1/models", headers={"origin": PAGE})
        assert answer.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in answer.headers


def test_lists_in_flags_and_contradictions() -> None:
    assert load_settings({"allowed_origins": ['["a", "b"]']}, {}).allowed_origins == ("a", "b")
    assert load_settings({"allowed_origins": ["a,b", "c"]}, {}).allowed_origins == ("a", "b", "c")
    with pytest.raises(SettingsError, match="name the origins"):
        load_settings({"allowed_origins": ["*"], "allow_credentials": True}, {})
