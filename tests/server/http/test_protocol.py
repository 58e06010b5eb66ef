"""Support for proxies and tools: keep-alives, a path prefix, the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import re
import time
from email.utils import parsedate_to_datetime
from pathlib import Path

import httpx
import pytest
import schemathesis
from starlette._utils import get_route_path

from server.request.endpoints import route_path
from tests.server.scripted import Running, ScriptedLauncher, running

CHAT = "/v1/chat/completions"
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
        dates = []
        for _ in range(2):
            answer = await service.client.get("/livez")
            dates.append(parsedate_to_datetime(answer.headers["date"]))
            assert abs(dates[-1].timestamp() - time.time()) < 10
            await asyncio.sleep(2.1)
        assert dates[1] > dates[0]
