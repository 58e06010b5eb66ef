"""The service's life over a scripted engine: start-up, ready, drain, death, exit codes."""

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from rbln_backend.reports.progress import ProgressWriter
from server.frontend import LaunchError
from tests.server.scripted import Running, ScriptedLauncher, running

CHAT = "/v1/chat/completions"


async def test_probes_tell_the_progress_while_the_engine_starts(tmp_path: Path) -> None:
    launcher = ScriptedLauncher()
    async with running(tmp_path, launcher) as service:
        writer = ProgressWriter(tmp_path, 0, None)
        writer.phase("compile")
        writer.plan(["decode-1", "decode-2"])
        writer.graph_done("decode-1", "compiled", 0.5)
        while (answer := await service.client.get("/readyz")).json()["phase"] != "compile":
            await asyncio.sleep(0.02)
        assert answer.status_code == 503
        assert int(answer.headers["retry-after"]) >= 1
        assert answer.json()["status"] == "starting"
        assert answer.json()["graphs"] == {"done": 1, "total": 2}
        assert answer.json()["eta_s"] is not None
        assert (await service.client.get("/livez")).status_code == 200
        assert (await service.client.get("/startupz")).status_code == 503
        assert (await service.client.get("/health")).status_code == 503
        assert (await service.client.get("/version")).json()["version"] == "1.2.3"
        assert await service.metric('rbln_serve_phase{phase="compile"}') == 1
        assert await service.metric("rbln_serve_warmup_graphs_done") == 1
        refused = await service.client.post(CHAT, json={"do": "answer"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")
        assert "1 of 2 graphs" in refused.json()["error"]["message"]
        assert "retry-after" in refused.headers
        assert (await service.client.get("/v1/models")).status_code == 503
        launcher.launched.set()
        await service.until_ready()
        assert (await service.client.get("/startupz")).json()["ready_after_s"] > 0
        assert (await service.client.post(CHAT, json={"do": "answer"})).json() == {"ok": True}
        assert await service.metric("rbln_serve_startup_seconds") > 0


async def test_the_last_start_tells_the_eta_until_the_engine_does(tmp_path: Path) -> None:
    launcher = ScriptedLauncher(earlier_s=5000.0)
    async with running(tmp_path, launcher) as service:
        eta_s = (await service.client.get("/startupz")).json()["eta_s"]
        assert 0 < eta_s < 5000
        refused = await service.client.post(CHAT, json={"do": "answer"})
        assert "s left" in refused.json()["error"]["message"]
        writer = ProgressWriter(tmp_path, 0, None)
        writer.phase("init")
        writer.step("kernels", 1, 2)
        while (await service.client.get("/startupz")).json()["eta_s"] > 100:
            await asyncio.sleep(0.02)
        assert launcher.kept_s is None
        launcher.launched.set()
        await service.until_ready()
        ready = (await service.client.get("/startupz")).json()
        assert ready["eta_s"] is None
        assert launcher.kept_s == pytest.approx(ready["ready_after_s"], abs=0.001)


async def test_engine_boards_are_on_the_metrics_page(tmp_path: Path) -> None:
    from rbln_backend.reports.metrics import MetricsBoard

    async with running(tmp_path) as service:
        board = MetricsBoard(tmp_path, 0)
        board.counter("rbln_bucket_steps_total", phase="decode", bucket=4).inc(3)
        page = (await service.client.get("/metrics")).text
        assert 'rbln_bucket_steps_total{bucket="4",phase="decode"} 3.0' in page
        board.close()


async def post(service: Running, **body: object) -> httpx.Response:
    return await service.client.post(CHAT, json=body)


async def test_sigterm_lets_requests_finish_and_takes_no_new_ones(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        stream = asyncio.create_task(post(service, do="wait", stream=True))
        answer = asyncio.create_task(post(service, do="wait"))
        await service.until("rbln_serve_in_flight_requests", 2)
        service.signal()
        while (ready := await service.client.get("/readyz")).status_code == 200:
            await asyncio.sleep(0.01)
        assert ready.json()["status"] == "draining"
        assert ready.json()["reason"] == "SIGTERM"
        assert (await service.client.get("/livez")).status_code == 200
        refused = await post(service, do="answer")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert refused.headers["connection"] == "close"
        assert "retry-after" in refused.headers
        assert not service.exit_code.done()
        service.frontend.go_on.set()
        assert (await stream).text.endswith("data: [DONE]\n\n")
        assert (await answer).json() == {"ok": True}
        assert await service.exit_code == 0
        assert service.launcher.engine.shut_down


@pytest.fixture
def heeds_signals() -> Iterator[None]:
    """As a process does that was started neither by nohup nor in the background."""
    usual = {signal.SIGINT: signal.default_int_handler, signal.SIGHUP: signal.SIG_DFL}
    before = {name: signal.signal(name, handler) for name, handler in usual.items()}
    yield
    for name, handler in before.items():
        signal.signal(name, handler)


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGHUP])
async def test_an_interrupt_and_a_terminal_that_closes_drain_too(
    tmp_path: Path, name: signal.Signals, heeds_signals: None
) -> None:
    async with running(tmp_path) as service:
        answer = asyncio.create_task(post(service, do="wait"))
        await until_in_flight(service, 1)
        os.kill(os.getpid(), name)
        while (ready := await service.client.get("/readyz")).status_code == 200:
            await asyncio.sleep(0.01)
        assert ready.json()["reason"] == name.name
        service.frontend.go_on.set()
        assert (await answer).json() == {"ok": True}
        assert await service.exit_code == 0


async def test_who_ignores_hangups_goes_on(tmp_path: Path) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        async with running(tmp_path) as service:
            os.kill(os.getpid(), signal.SIGHUP)
            await asyncio.sleep(0.1)
            assert (await service.client.get("/readyz")).status_code == 200
    finally:
        signal.signal(signal.SIGHUP, before)


async def until_in_flight(service: Running, number: int) -> None:
    await service.until("rbln_serve_in_flight_requests", number)


LAST_FRAMES = {
    CHAT: 'data: {"error": {',
    "/v1/completions": 'data: {"error": {',
    "/v1/responses": 'event: error\ndata: {"type": "error", "code": "draining"',
    "/v1/messages": 'event: error\ndata: {"type": "error", "error": {',
}


def assert_cut_off(path: str, text: str, code: str) -> None:
    """A stream that was cut off says so, in the manner of its endpoint."""
    first, _, rest = text.partition("\n\n")
    assert first == "data: first"
    assert rest.startswith(LAST_FRAMES[path])
    assert f'"code": "{code}"' in rest
    assert "The answer was cut off." in rest
    assert rest.endswith("data: [DONE]\n\n") == (path in (CHAT, "/v1/completions"))


@pytest.mark.parametrize("signals", [1, 2])
async def test_streams_that_are_cut_off_end_with_an_error(
    tmp_path: Path, signals: int, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, drain_timeout_s=60 if signals > 1 else 0.2) as service:
        body = {"do": "wait", "stream": True}
        streams = {
            path: asyncio.create_task(service.client.post(path, json=body)) for path in LAST_FRAMES
        }
        answer = asyncio.create_task(post(service, do="wait"))
        reader, writer = await asyncio.open_connection("127.0.0.1", service.port)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: 9\r\n\r\n{{".encode())
        await until_in_flight(service, 6)
        for _ in range(signals):
            service.signal()
            await asyncio.sleep(0.05)
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 3) == 0
        for path, stream in streams.items():
            assert_cut_off(path, (await stream).text, "draining")
        assert (await answer).status_code == 503
        assert (await answer).json()["error"]["code"] == "draining"
        assert (await reader.readline()).startswith(b"HTTP/1.1 503")
        writer.close()
        assert sorted(service.frontend.ended) == ["answer aborted", *["stream aborted"] * 4]
    assert "Traceback" not in caplog.text
    assert not [r for r in caplog.records if r.name.startswith("uvicorn") and r.levelno > 30]


async def test_a_client_that_does_not_read_holds_up_no_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tmp_path, drain_timeout_s=60) as service:
        body = b'{"do":"flood","stream":true}'
        _, writer = await asyncio.open_connection("127.0.0.1", service.port, limit=1024)
        head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        await until_in_flight(service, 1)
        await asyncio.sleep(0.3)
        service.signal()
        await asyncio.sleep(0.05)
        service.signal()
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 4) == 0
        writer.close()
    assert "Traceback" not in caplog.text


async def test_a_second_signal_kills_an_engine_that_takes_its_time(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        engine = service.launcher.engine
        engine.ends_by_itself = False
        service.signal()
        while not engine.shut_down:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        assert not service.exit_code.done()
        assert not engine.killed.is_set()
        service.signal()
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 3) == 0
        assert engine.killed.is_set()


async def test_requests_of_a_dead_engine_end_with_an_error(tmp_path: Path) -> None:
    async with running(tmp_path, death_linger_s=0.1) as service:
        body = {"do": "wait", "stream": True}
        stream = asyncio.create_task(service.client.post(CHAT, json=body))
        answer = asyncio.create_task(post(service, do="wait"))
        await until_in_flight(service, 2)
        service.launcher.engine.death = "engine process ended with exit code -9"
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 5) == 1
        assert_cut_off(CHAT, (await stream).text, "engine_failed")
        assert (await answer).json()["error"]["code"] == "engine_failed"


async def test_a_dead_engine_ends_the_process_with_1(tmp_path: Path) -> None:
    async with running(tmp_path, death_linger_s=1.0) as service:
        service.launcher.engine.death = "engine process ended with exit code -9"
        while (ready := await service.client.get("/readyz")).status_code == 200:
            await asyncio.sleep(0.01)
        assert ready.json()["status"] == "dead"
        assert "exit code -9" in ready.json()["reason"]
        assert (await service.client.get("/livez")).status_code == 503
        assert (await service.client.get("/startupz")).status_code == 503
        refused = await post(service, do="answer")
        assert refused.json()["error"]["code"] == "engine_failed"
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 5) == 1


async def test_a_failed_launch_gives_its_exit_code(tmp_path: Path) -> None:
    launcher = ScriptedLauncher(error=LaunchError("no such model", exit_code=2))
    launcher.launched.set()
    async with running(tmp_path, launcher) as service:
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 5) == 2


async def test_a_refused_model_is_explained_before_the_process_ends(tmp_path: Path) -> None:
    launcher = ScriptedLauncher(error=LaunchError("no op for this"))
    launcher.launched.set()
    async with running(tmp_path, launcher, death_linger_s=1.0) as service:
        while (ready := await service.client.get("/readyz")).json()["status"] == "starting":
            await asyncio.sleep(0.01)
        assert (ready.status_code, ready.json()["status"]) == (503, "dead")
        assert ready.json()["reason"] == "no op for this"
        refused = await service.client.post(CHAT, json={"do": "answer"})
        assert "no op for this" in refused.json()["error"]["message"]
        # Probes come every few seconds: it stays until the time for that is over.
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(service.exit_code), 0.5)
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 5) == 1


async def test_a_signal_ends_the_explanation(tmp_path: Path) -> None:
    launcher = ScriptedLauncher(error=LaunchError("no op for this"))
    launcher.launched.set()
    async with running(tmp_path, launcher, death_linger_s=60) as service:
        while (await service.client.get("/readyz")).json()["status"] == "starting":
            await asyncio.sleep(0.01)
        service.signal()
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 5) == 1


async def test_sigterm_during_start_up_gives_up_the_launch(tmp_path: Path) -> None:
    async with running(tmp_path, ScriptedLauncher()) as service:
        assert (await service.client.get("/readyz")).status_code == 503
        service.signal()
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 5) == 0
        assert service.launcher.abandoned
