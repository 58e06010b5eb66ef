"""The service's life over a scripted engine: start-up, ready, drain, death, exit codes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from rbln_backend.progress import ProgressWriter
from server.frontend import LaunchError
from tests.http.scripted import Running, ScriptedLauncher, running

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
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "not_ready"
        assert "1 of 2 graphs" in refused.json()["error"]["message"]
        assert "retry-after" in refused.headers
        assert (await service.client.get("/v1/models")).status_code == 503
        launcher.launched.set()
        await service.until_ready()
        assert (await service.client.get("/startupz")).json()["ready_after_s"] > 0
        assert (await service.client.post(CHAT, json={"do": "answer"})).json() == {"ok": True}
        assert await service.metric("rbln_serve_startup_seconds") > 0


async def test_engine_boards_are_on_the_metrics_page(tmp_path: Path) -> None:
    from rbln_backend.stats import MetricsBoard

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
        while await service.metric("rbln_serve_in_flight_requests") < 2:
            await asyncio.sleep(0.01)
        service.signal()
        while (ready := await service.client.get("/readyz")).status_code == 200:
            await asyncio.sleep(0.01)
        assert ready.json()["status"] == "draining"
        assert ready.json()["reason"] == "SIGTERM"
        assert (await service.client.get("/livez")).status_code == 200
        refused = await post(service, do="answer")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "draining"
        assert refused.headers["connection"] == "close"
        assert "retry-after" in refused.headers
        assert not service.exit_code.done()
        service.frontend.go_on.set()
        assert (await stream).text.endswith("data: [DONE]\n\n")
        assert (await answer).json() == {"ok": True}
        assert await service.exit_code == 0
        assert service.launcher.engine.shut_down


async def test_a_drain_ends_at_its_timeout(tmp_path: Path) -> None:
    async with running(tmp_path, drain_timeout_s=0.2) as service:
        request = asyncio.create_task(post(service, do="wait", stream=True))
        while await service.metric("rbln_serve_in_flight_requests") < 1:
            await asyncio.sleep(0.01)
        service.signal()
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 5) == 0
        assert service.frontend.ended == ["stream aborted"]
        with pytest.raises(httpx.RemoteProtocolError):
            await request


async def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    async with running(tmp_path, drain_timeout_s=60) as service:
        request = asyncio.create_task(post(service, do="wait", stream=True))
        while await service.metric("rbln_serve_in_flight_requests") < 1:
            await asyncio.sleep(0.01)
        service.signal()
        await asyncio.sleep(0.1)
        assert not service.exit_code.done()
        service.signal()
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 5) == 0
        await asyncio.wait({request})
        assert request.exception() is not None


async def test_a_dead_engine_ends_the_process_with_1(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
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
        assert ready.status_code == 503
        assert ready.json()["status"] == "dead"
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
