"""Limits of connections: sizes, times, numbers, unread bodies and unread responses."""

import asyncio
import json
import os
import re
import shutil
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
import schemathesis
from starlette._utils import get_route_path

from server.http.listener import Tls
from server.http.transport import get_client
from server.request.endpoints import route_path
from server.settings import ServerSettings, SettingsError
from tests.debian_tools import debian_tool
from tests.server.certificates import Authority, make_authority
from tests.server.http.wire import CHAT, connected, get, post
from tests.server.scripted import Running, ScriptedLauncher, running, said

LIVE = get("/livez")
BIG = b"x" * 65536


def refusals(reason: str) -> str:
    return f'rbln_http_connection_refusals_total{{reason="{reason}"}}'


@asynccontextmanager
async def served(
    tmp_path: Path, tls: bool, **settings: Any
) -> AsyncIterator[tuple[Running, ssl.SSLContext | None]]:
    """The service, with or without TLS, and what a client of it has."""
    if not tls:
        async with running(tmp_path, **settings) as service:
            yield service, None
        return
    authority = make_authority(tmp_path)
    cert, key = authority.sign(tmp_path / "a")
    context = ssl.create_default_context(cafile=str(authority.file))
    files = {"ssl_certfile": cert, "ssl_keyfile": key}
    async with running(tmp_path, client_context=context, **files, **settings) as service:
        yield service, context


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("tls", [False, pytest.param(True, marks=pytest.mark.wide)])
@pytest.mark.parametrize(
    "start",
    [
        b"GET /livez HTTP/1.1\r\nhost: x\r\na: ",
        b"GET /",
        b"GET /livez HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 20,
        # Behind a body, where there is no end to the fields, either.
        b"POST %s HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        b"transfer-encoding: chunked\r\n\r\n0\r\na: " % CHAT.encode(),
    ],
)
async def test_endless_headers_end_and_cost_little(tmp_path: Path, start: bytes, tls: bool) -> None:
    async with served(tmp_path, tls) as (service, context):
        async with connected(service.port, context) as wire:
            before = resident_bytes()
            await wire.send(start)
            reading = asyncio.create_task(wire.answer())
            sent = await wire.send_until_cut(BIG)
            answer = await reading
            assert (answer.status, answer.code) == (431, "headers_too_large")
            # What was taken, and what lies in the kernel's buffers.
            assert sent < 40 * 1024 * 1024
            assert resident_bytes() - before < 20 * 1024 * 1024
        assert await service.metric(refusals("headers_too_large")) == 1


async def test_the_limit_of_headers_is_exact(tmp_path: Path) -> None:
    fixed = len(b"/livez" + b"host: x\r\n" + b"a: \r\n")
    async with running(tmp_path, max_header_bytes=2048) as service:
        async with connected(service.port) as wire:
            for _ in range(2):
                await wire.send(get("/livez", b"a: " + b"b" * (2048 - fixed)))
                assert (await wire.answer()).status == 200
            await wire.send(get("/livez", b"a: " + b"b" * (2049 - fixed)))
            assert (await wire.answer()).code == "headers_too_large"
        async with connected(service.port) as wire:
            # A body counts for nothing there, in whatever pieces it comes.
            await wire.send(post(json.dumps({"do": "answer", "x": "y" * 9000}).encode()))
            assert (await wire.answer()).status == 200


@pytest.mark.parametrize("tls", [False, True])
async def test_half_a_head_is_not_waited_for(tmp_path: Path, tls: bool) -> None:
    async with served(tmp_path, tls, header_timeout_s=0.4, linger_s=0.3) as (service, context):
        async with connected(service.port, context) as silent:
            started = time.monotonic()
            assert await silent.closed() == b""
            assert 0.3 < time.monotonic() - started < 10.0
        for prepared in (b"", LIVE):
            async with connected(service.port, context) as wire:
                if prepared:
                    await wire.send(prepared)
                    await wire.answer()
                    # Between requests another limit holds.
                    await asyncio.sleep(0.8)
                started = time.monotonic()
                for byte in LIVE[:12]:
                    await wire.send(bytes([byte]))
                    await asyncio.sleep(0.1)
                    if wire.reader._buffer:  # type: ignore[attr-defined]
                        break
                answer = await wire.answer()
                assert (answer.status, answer.code) == (408, "header_timeout")
                assert 0.3 < time.monotonic() - started < 10.0
                assert await wire.closed(5.0) == b""
        assert await service.metric(refusals("header_timeout")) == 3


async def test_the_next_head_is_timed_from_the_end_of_the_answer(tmp_path: Path) -> None:
    async with running(tmp_path, header_timeout_s=0.4) as service, connected(service.port) as wire:
        await wire.send(post({"do": "wait"}) + LIVE[:8])
        await asyncio.sleep(0.1)
        await wire.send(LIVE[8:10])
        await asyncio.sleep(0.7)
        service.frontend.go_on.set()
        assert (await wire.answer()).status == 200
        await wire.send(LIVE[10:] + LIVE[:10])
        assert (await wire.answer()).status == 200
        assert (await wire.answer()).code == "header_timeout"


async def test_an_idle_connection_is_closed_without_a_word(tmp_path: Path) -> None:
    async with running(tmp_path, keep_alive_s=1) as service, connected(service.port) as wire:
        await wire.send(LIVE)
        await wire.answer()
        assert await wire.closed(10.0) == b""


async def test_many_half_sent_heads_do_not_block_other_clients(tmp_path: Path) -> None:
    async with running(tmp_path, header_timeout_s=2.0) as service, AsyncExitStack() as stack:
        slow = [await stack.enter_async_context(connected(service.port)) for _ in range(200)]
        for wire in slow:
            await wire.send(LIVE[:20])
        assert await service.metric("rbln_http_connections") == 201
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200
        codes = await asyncio.gather(*(wire.answer() for wire in slow))
        assert {answer.code for answer in codes} == {"header_timeout"}
        async with asyncio.timeout(20):
            while await service.metric("rbln_http_connections") > 1:
                await asyncio.sleep(0.05)
        assert await service.metric(refusals("header_timeout")) == 200


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("close", [False, True])
async def test_an_endless_body_after_the_answer_is_not_read(
    tmp_path: Path, tls: bool, close: bool
) -> None:
    more = [b"connection: close"] * close
    limits = {"max_body_bytes": 1024, "body_linger_bytes": 4 * 1024 * 1024}
    async with served(tmp_path, tls, **limits) as (service, context):
        async with connected(service.port, context) as wire:
            await wire.send(post(b"x" * 2000, *more).replace(b": 2000", b": 999999999999"))
            assert (await wire.answer()).code == "body_too_large"
            started = time.monotonic()
            # The kernel's buffers take some of it.
            assert await wire.send_until_cut(BIG) < 24 * 1024 * 1024
            assert time.monotonic() - started < 20.0
        assert close or await service.metric(refusals("unread_body")) == 1


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("close", [False, True])
async def test_a_body_that_is_not_sent_after_the_answer_is_not_waited_for(
    tmp_path: Path, tls: bool, close: bool
) -> None:
    async with (
        served(tmp_path, tls, linger_s=0.4, body_linger_s=1.0, api_key=("k",)) as (
            service,
            context,
        ),
        connected(service.port, context) as wire,
    ):
        await wire.send(post(b"x" * 2000, *[b"connection: close"] * close)[:-1000])
        assert (await wire.answer()).code == "invalid_api_key"
        started = time.monotonic()
        # With a FIN already, where that differs from the end.
        await wire.closed()
        await wire.send_until_cut(b"x", 3.0)
        assert time.monotonic() - started < 10.0


async def test_an_answer_reaches_a_client_that_sends_all_of_its_body_first(tmp_path: Path) -> None:
    async with running(tmp_path, max_body_bytes=1024) as service:
        for version in (b"1.1", b"1.0"):
            for more in ([], [b"connection: close"]):
                async with connected(service.port) as wire:
                    await wire.send(post(b"x" * 8_000_000, *more, version=version))
                    assert (await wire.answer()).code == "body_too_large"


@pytest.mark.parametrize("http", ["1.0", "1.1"])
async def test_a_proxy_that_has_buffered_a_large_body_gets_413(tmp_path: Path, http: str) -> None:
    nginx = debian_tool("nginx")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    async with running(tmp_path, linger_s=2.0) as service:
        (tmp_path / "nginx.conf").write_text(
            f"daemon off; error_log stderr; pid {tmp_path}/pid; user root; events {{}} http {{"
            f" client_body_temp_path {tmp_path}/body; proxy_temp_path {tmp_path}/proxy;"
            f" fastcgi_temp_path {tmp_path}/f; uwsgi_temp_path {tmp_path}/u;"
            f" scgi_temp_path {tmp_path}/s; access_log off;"
            f" server {{ listen 127.0.0.1:{port}; client_max_body_size 100m;"
            f" location / {{ proxy_http_version {http};"
            f" proxy_pass http://127.0.0.1:{service.port}; }} }} }}"
        )
        arguments = ("-p", str(tmp_path), "-c", str(tmp_path / "nginx.conf"))
        proxy = await asyncio.create_subprocess_exec(nginx, *arguments)
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                async with asyncio.timeout(10):
                    while True:
                        with suppress(httpx.ConnectError):
                            await client.get("/livez")
                            break
                        await asyncio.sleep(0.05)
                for _ in range(3):
                    answer = await client.post(CHAT, json={"do": "x" * 30_000_000})
                    assert answer.status_code == 413
                    assert answer.json()["error"]["code"] == "body_too_large"
        finally:
            proxy.terminate()
            await proxy.wait()


async def test_a_slow_client_may_send_the_rest_of_its_body(tmp_path: Path) -> None:
    limits = {"max_body_bytes": 1024, "linger_s": 0.6}
    async with running(tmp_path, **limits) as service, connected(service.port) as wire:
        await wire.send(post(b"x" * 2000)[:-1000])
        assert (await wire.answer()).code == "body_too_large"
        for _ in range(10):
            await asyncio.sleep(0.1)
            await wire.send(b"x" * 100)
        await wire.send(LIVE)
        assert (await wire.answer()).status == 200


async def test_what_is_left_of_a_body_is_no_request(tmp_path: Path) -> None:
    late = b"DELETE /livez HTTP/1.1\r\nhost: x\r\n\r\n"
    async with running(tmp_path, body_timeout_s=0.3, linger_s=1.0) as service:
        async with connected(service.port) as wire:
            await wire.send(post(b" " * len(late))[: -len(late)])
            assert (await wire.answer()).code == "body_timeout"
            await wire.send(late + get("/version"))
            assert await wire.closed(5.0) == b""
        async with connected(service.port) as wire:
            # The same with an answer that keeps the connection: the body ends, then a request.
            await wire.send(get("/nope", b"content-length: %d" % len(late)))
            assert (await wire.answer()).status == 404
            await wire.send(late + LIVE)
            assert (await wire.answer()).status == 200
        page = (await service.client.get("/metrics")).text
        assert 'method="DELETE"' not in page and 'route="/version"' not in page


async def test_a_client_that_does_not_read_is_given_up(tmp_path: Path) -> None:
    async with running(tmp_path, write_timeout_s=0.5) as service:
        frontend = service.frontend

        async def flood(do: str) -> AsyncIterator[str]:
            try:
                while True:
                    await asyncio.sleep(0)
                    yield f"data: {'x' * 60000}\n\n"
            finally:
                frontend.ended.append("flood aborted")

        frontend._stream = flood  # type: ignore[method-assign, assignment]
        for version in (b"1.1", b"1.0"):
            frontend.ended.clear()
            async with connected(service.port) as wire:
                wire.writer.transport.pause_reading()  # type: ignore[attr-defined]
                await wire.send(post({"do": "x", "stream": True}, version=version))
                started = time.monotonic()
                async with asyncio.timeout(30):
                    while not frontend.ended:
                        await asyncio.sleep(0.02)
                assert time.monotonic() - started > 0.4
        assert await service.metric(refusals("write_timeout")) == 2
        assert await service.metric("rbln_http_connections") == 1


@pytest.mark.parametrize("tls", [False, True])
async def test_connections_are_limited_in_all_and_by_client(tmp_path: Path, tls: bool) -> None:
    for limit, status, code in [
        ({"max_connections": 3, "max_connections_per_client": 9}, 503, "too_many_connections"),
        ({"max_connections_per_client": 3}, 429, "too_many_client_connections"),
    ]:
        folder = tmp_path / code
        folder.mkdir()
        async with served(folder, tls, **limit) as (service, context):
            async with AsyncExitStack() as stack:
                # The test's own client has one of them.
                places = [
                    await stack.enter_async_context(connected(service.port, context))
                    for _ in range(2)
                ]
                for wire in places:
                    await wire.send(LIVE)
                    assert (await wire.answer()).status == 200
                async with connected(service.port, context) as wire:
                    await wire.send(LIVE)
                    answer = await wire.answer()
                    assert (answer.status, answer.code) == (status, code)
                    assert answer.headers["retry-after"] == "1"
                assert await service.metric("rbln_http_connections") == 3
                assert await service.metric(refusals(code)) == 1
            async with asyncio.timeout(20):
                while await service.metric("rbln_http_connections") > 1:
                    await asyncio.sleep(0.02)
            async with connected(service.port, context) as wire:
                await wire.send(LIVE)
                assert (await wire.answer()).status == 200


async def test_of_very_many_too_many_most_are_only_closed(tmp_path: Path) -> None:
    async with running(tmp_path, max_connections=1) as service, AsyncExitStack() as stack:
        wires = [await stack.enter_async_context(connected(service.port)) for _ in range(100)]
        said = await asyncio.gather(*(wire.closed() for wire in wires))
        assert sum(b"too_many_connections" in words for words in said) == 64
        assert said.count(b"") == 36
        assert await service.metric(refusals("too_many_connections")) == 100


def test_a_client_is_an_address_or_a_network() -> None:
    assert get_client("10.0.0.1") == get_client("::ffff:10.0.0.1") == "10.0.0.1"
    assert get_client("2001:db8::1") == get_client("2001:db8::2:3") == "2001:db8::/64"
    assert get_client("2001:db8:0:1::1") != get_client("2001:db8::1")
    assert get_client("fe80::1%eth0") == "fe80::/64"


async def test_a_handshake_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    async with served(tmp_path, True, header_timeout_s=0.5) as (service, _):
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        async with asyncio.timeout(20):
            assert await reader.read() == b""
        writer.close()


async def test_the_end_waits_for_no_rest_of_a_body(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        running(tmp_path, linger_s=30.0) as service,
        connected(service.port) as kept,
        connected(service.port) as closing,
    ):
        await kept.send(get("/nope", b"content-length: 100"))
        await closing.send(get("/nope", b"content-length: 100", b"connection: close"))
        for wire in (kept, closing):
            assert (await wire.answer()).status == 404
        service.signal()
        assert await service.exit_code == 0
        assert "timeout graceful shutdown exceeded" not in caplog.text


async def test_an_answer_of_a_drain_ends_its_connection(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        await service.client.post("/admin/drain")
        async with connected(service.port) as wire:
            await wire.send(post({"do": "answer"})[:-3])
            answer = await wire.answer()
            assert (answer.code, answer.headers["connection"]) == ("draining", "close")
            await wire.send(b'er"}')
            assert await wire.closed(1.0) == b""
        for path in ("/livez", "/readyz", "/metrics"):
            async with connected(service.port) as wire:
                await wire.send(get(path))
                assert (await wire.answer()).headers["connection"] == "close"


def test_the_limit_of_open_files_is_raised_and_kept_to() -> None:
    import resource

    from server.http.transport import _connection_limit

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
        assert _connection_limit(1000) == 1000
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == (1256, hard)
        assert _connection_limit(hard) == hard - 256
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_an_idle_connection_outlives_that_of_gos_clients() -> None:
    """Go's transport and llm-d's sidecar use a connection again for 90 s."""
    assert ServerSettings().keep_alive_s > 90


# ---------------------------------------------------------------------------------------------- tls
@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return make_authority(tmp_path)


def files(cert: Path, key: Path, **more: Any) -> dict[str, Any]:
    return {"ssl_certfile": cert, "ssl_keyfile": key, **more}


def trusting(authority: Authority) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(authority.file))


async def get_over_tls(service: Running, context: ssl.SSLContext) -> int:
    async with httpx.AsyncClient(verify=context) as client:
        answer = await client.get(f"https://127.0.0.1:{service.port}/livez")
        return answer.status_code


async def seen_name(service: Running, authority: Authority) -> str:
    """The common name of the certificate that a new connection gets."""
    context = trusting(authority)
    _, writer = await asyncio.open_connection("127.0.0.1", service.port, ssl=context)
    certificate = writer.get_extra_info("peercert")
    writer.close()
    return str(certificate["subject"][0][0][1])


async def test_it_serves_over_tls_with_a_key_that_has_a_password(
    tmp_path: Path, authority: Authority
) -> None:
    cert, key = authority.sign(tmp_path / "a", password="hush")
    settings = files(cert, key, ssl_keyfile_password="hush")
    async with running(tmp_path, client_context=trusting(authority), **settings) as service:
        assert await get_over_tls(service, trusting(authority)) == 200
        with pytest.raises(httpx.ConnectError):
            await get_over_tls(service, ssl.create_default_context())
        old = trusting(authority)
        old.maximum_version = ssl.TLSVersion.TLSv1_2
        old.minimum_version = ssl.TLSVersion.TLSv1_2
        assert await get_over_tls(service, old) == 200


async def test_client_certificates_can_be_required(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.sign(tmp_path / "a")
    settings = files(cert, key, ssl_ca_certs=authority.file, ssl_cert_reqs="required")
    known = trusting(authority)
    known.load_cert_chain(*authority.sign(tmp_path / "client", "someone"))
    async with running(tmp_path, client_context=known, **settings) as service:
        assert await get_over_tls(service, known) == 200
        with pytest.raises((httpx.ReadError, httpx.RemoteProtocolError, httpx.ConnectError)):
            await get_over_tls(service, trusting(authority))


async def test_a_renewed_certificate_is_used_and_half_a_one_is_not(
    tmp_path: Path, authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    cert, key = authority.sign(tmp_path / "a", "first")
    settings = files(cert, key, enable_ssl_refresh=True)
    async with running(tmp_path, client_context=trusting(authority), **settings) as service:
        assert await seen_name(service, authority) == "first"
        new_cert, new_key = authority.sign(tmp_path / "b", "second")
        shutil.copy(new_cert, cert)
        await said(caplog, "Kept the previous TLS certificate")
        # The certificate's key is not there yet.
        assert await seen_name(service, authority) == "first"
        os.mkfifo(tmp_path / "pipe")
        caplog.clear()
        (tmp_path / "pipe").replace(key)
        await said(caplog, "Kept the previous TLS certificate")
        assert await seen_name(service, authority) == "first"
        key.unlink()
        shutil.copy(new_key, key)
        async with asyncio.timeout(10):
            while await seen_name(service, authority) != "second":
                await asyncio.sleep(0.1)


def test_what_is_wrong_is_said_at_start(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.sign(tmp_path / "a", password="hush")
    _, other = authority.sign(tmp_path / "b")
    os.mkfifo(pipe := tmp_path / "pipe")
    for settings, words in [
        (files(tmp_path / "nowhere.pem", key), "nowhere.pem"),
        (files(cert, other), "--ssl-keyfile"),
        (files(pipe, key), "--ssl-certfile .*pipe .*not a regular file"),
        (files(cert, pipe), "--ssl-keyfile .*pipe .*not a regular file"),
        (files(cert, key, ssl_ca_certs=pipe), "--ssl-ca-certs .*not a regular file"),
        (files(cert, key), "--ssl-keyfile"),
        (files(cert, key, ssl_keyfile_password="wrong"), "--ssl-keyfile"),
        (files(cert, key, ssl_keyfile_password="hush", ssl_ciphers="NONSENSE"), "NONSENSE"),
    ]:
        with pytest.raises(SettingsError, match=words) as caught:
            Tls(ServerSettings(**settings))
        assert "hush" not in str(caught.value)


# ----------------------------------------------------------------------------------------- protocol
STREAM = {"do": "wait", "stream": True}
COMMENT = ": keep-alive"
PROBES = ("/livez", "/readyz", "/startupz", "/health", "/ping")


async def lines_of(service: Running, seconds: float) -> list[str]:
    """The lines of a stream that is silent for so long after its first frame."""
    async with service.client.stream("POST", CHAT, json=STREAM) as answer:
        lines = answer.aiter_lines()
        assert await anext(lines) == "data: first"
        await asyncio.sleep(seconds)
        service.frontend.go_on.set()
        return [line async for line in lines if line]


async def test_silence_in_a_stream_is_broken_by_comments(tmp_path: Path) -> None:
    launcher = ScriptedLauncher()
    launcher.engine.frontend.keep_alive_s = 0.2
    launcher.launched.set()
    async with running(tmp_path, launcher) as service:
        lines = await lines_of(service, 1.0)
        assert set(lines[:-1]) == {COMMENT}
        assert 3 <= len(lines[:-1]) <= 12
        assert lines[-1] == "data: [DONE]"


async def test_comments_are_optional_and_absent_from_active_streams(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        assert await lines_of(service, 0.5) == ["data: [DONE]"]
    launcher = ScriptedLauncher()
    launcher.engine.frontend.keep_alive_s = 5.0
    launcher.launched.set()
    async with running(tmp_path, launcher) as service:
        assert await lines_of(service, 0.2) == ["data: [DONE]"]


async def test_a_client_that_leaves_in_silence_still_aborts(tmp_path: Path) -> None:
    launcher = ScriptedLauncher()
    launcher.engine.frontend.keep_alive_s = 0.1
    launcher.launched.set()
    async with running(tmp_path, launcher) as service:
        async with service.client.stream("POST", CHAT, json=STREAM) as answer:
            lines = answer.aiter_lines()
            while await anext(lines) != COMMENT:
                pass
        async with asyncio.timeout(5):
            while service.frontend.ended != ["stream aborted"]:
                await asyncio.sleep(0.01)


@pytest.mark.parametrize("root", ["", "/llm", "/a/b"])
@pytest.mark.parametrize(
    "path",
    ["/livez", "/llm/livez", "/llm", "/llm/", "/llmx/livez", "/a/b/livez", "/a/b", "//llm/x"],
)
def test_keys_are_required_by_the_path_that_the_router_sees(root: str, path: str) -> None:
    scope = {"path": path, "root_path": root}
    assert route_path(scope) == get_route_path(scope)


async def test_a_prefix_changes_neither_routes_nor_who_may_call_them(tmp_path: Path) -> None:
    settings = {"root_path": "/llm", "api_key": ("k",), "admin_key": ("a",)}
    async with running(tmp_path, **settings) as service:
        service.client.headers["x-api-key"] = "k"
        for prefix in ("", "/llm"):
            assert (await service.client.get(f"{prefix}/v1/models")).status_code == 200
            answer = await service.client.post(f"{prefix}/admin/drain")
            assert answer.json()["error"]["code"] == "permission_denied"
        assert (await service.client.get("/llmx/v1/models")).status_code == 404
        labels = 'code="200",method="GET",outcome="ok",route="/v1/models"'
        assert await service.metric(f"rbln_http_requests_total{{{labels}}}") == 2
        document = (await service.client.get("/openapi.json")).json()
        assert document["servers"] == [{"url": "/llm"}]


async def test_the_document_is_there_once_the_engine_is(tmp_path: Path) -> None:
    launcher = ScriptedLauncher()
    async with running(tmp_path, launcher) as service:
        answer = await service.client.get("/openapi.json")
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
        assert "retry-after" in answer.headers
        launcher.launched.set()
        await service.until_ready()
        document = (await service.client.get("/openapi.json")).json()
    loaded = schemathesis.openapi.from_dict(document)
    assert len([result.ok() for result in loaded.get_all_operations()]) > 20


async def test_what_is_described_is_whole(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        document = (await service.client.get("/openapi.json")).json()
    schemas = document["components"]["schemas"]
    envelope = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorEnvelope"}}}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            assert operation["summary"].endswith("."), path
            assert operation["operationId"] == f"{method}{path}"
            assert ("security" in operation) is ("401" in operation["responses"])
            failures = {k: v for k, v in operation["responses"].items() if k >= "400"}
            if path in PROBES:
                del failures["503"]
            for status, failure in failures.items():
                assert failure["content"] == envelope, (path, status)
                assert failure["description"].startswith("`"), (path, status)
    assert schemas["ErrorEnvelope"]["required"] == ["error"]
    assert set(re.findall(r"#/components/schemas/(\w+)", json.dumps(document))) == set(schemas)


async def test_every_described_method_is_the_routers(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        document = (await service.client.get("/openapi.json")).json()
        for path, operations in document["paths"].items():
            plain = path.replace("{", "").replace("}", "")
            answer: httpx.Response = await service.client.request("TRACE", plain)
            assert answer.status_code == 405, path
            allowed = set(answer.headers["allow"].split(", ")) - {"HEAD"}
            assert allowed == {method.upper() for method in operations}, path


async def test_the_date_of_answers_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        dates: set[str] = set()
        async with asyncio.timeout(10):
            while len(dates) < 2:
                answer = await service.client.get("/livez")
                dates.add(answer.headers["date"])
                date = parsedate_to_datetime(answer.headers["date"])
                assert abs(date.timestamp() - time.time()) < 10
                await asyncio.sleep(0.1)
