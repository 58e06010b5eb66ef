"""`/v1/server_info` while nothing, a part and all is known, and its documented schema."""

import asyncio
import hashlib
import json
import re
import time
from pathlib import Path
from typing import Any, get_type_hints

import httpx
import pytest
from pydantic import TypeAdapter

from rbln_backend.reports.info import SECTIONS, DescriptionWriter, DraftModelInfo, LimitsInfo
from rbln_backend.reports.progress import ProgressWriter
from server.observability.traffic import Sample
from server.routes.console import FOLDER
from server.routes.server_info import SERVER_FIELDS
from server.wire import JsonObject
from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer
from tests.server.scripted import (
    Running,
    ScriptedEngine,
    ScriptedFrontend,
    ScriptedLauncher,
    ScriptedProfiler,
    running,
)

PATH = "/v1/server_info"
LIMITS = LimitsInfo(max_model_len=8, max_num_seqs=2, max_num_batched_tokens=4)


def check_against_the_schema(info: dict[str, Any]) -> None:
    """Every documented field is there, nothing else is, and the types are the documented ones."""
    assert set(info) == {*SERVER_FIELDS, *SECTIONS}
    for name, section in SECTIONS.items():
        if info[name] is not None:
            assert set(info[name]) == set(get_type_hints(section)), name
            TypeAdapter(section).validate_json(json.dumps(info[name]), strict=True)


async def test_it_answers_while_the_engine_starts_with_what_is_known(tmp_path: Path) -> None:
    launcher = ScriptedLauncher()
    async with running(tmp_path, launcher, max_body_bytes=4096) as service:
        answer = await service.client.get(PATH)
        assert answer.status_code == 200
        info = answer.json()
        check_against_the_schema(info)
        assert info["ranks"] == 0
        assert all(info[name] is None for name in SECTIONS)
        assert info["tools"] is None
        assert info["status"]["status"] == "starting"
        assert info["timings"]["ready_after_s"] is None
        assert info["request_limits"]["max_body_bytes"] == 4096
        assert info["settings"]["server"]["drain_timeout_s"] == 25
        DescriptionWriter(tmp_path, 0).write("limits", LIMITS)
        progress = ProgressWriter(tmp_path, 0, None)
        progress.plan(["decode-1", "decode-2"])
        progress.graph_done("decode-1", "loaded", 0.5)
        while not (info := (await service.client.get(PATH)).json())["graphs"]:
            pass
        check_against_the_schema(info)
        assert (info["ranks"], info["limits"]["max_num_seqs"]) == (1, 2)
        assert info["graphs"] == [
            {"name": "decode-1", "state": "done", "result": "loaded", "seconds": 0.5},
            {"name": "decode-2", "state": "pending", "result": None, "seconds": None},
        ]
        # The last stage of a pipeline has the draft model.
        drafts = DraftModelInfo(name="d", method="eagle3", drafts=3, weight_bytes=8)
        DescriptionWriter(tmp_path, 1).write("draft_model", drafts)
        info = (await service.client.get(PATH)).json()
        assert (info["ranks"], info["draft_model"]["weight_bytes"]) == (2, 8)
        progress.close()


async def test_it_still_tells_of_a_dead_engine(tmp_path: Path) -> None:
    launcher = ScriptedLauncher(engine=ScriptedEngine(ScriptedFrontend()))
    launcher.launched.set()
    async with running(tmp_path, launcher, death_linger_s=2) as service:
        DescriptionWriter(tmp_path, 0).write("limits", LIMITS)
        launcher.engine.death = "it is gone"
        while (info := (await service.client.get(PATH)).json())["status"]["status"] != "dead":
            pass
        assert info["status"]["reason"] == "it is gone"
        assert info["limits"]["max_model_len"] == 8
        labels = f'code="200",method="GET",outcome="ok",route="{PATH}"'
        assert await service.metric(f"rbln_http_requests_total{{{labels}}}") > 0


async def test_the_history_is_there_and_takes_numbers_alone(tmp_path: Path) -> None:
    async with running(tmp_path, api_key=["secret"]) as service:
        path, key = f"{PATH}/history", {"authorization": "Bearer secret"}
        assert (await service.client.get(path)).status_code == 401
        answer = await service.client.get(path, headers=key)
        assert answer.json() == {"period_s": 5.0, "samples": []}
        for after in ("x", "-1", "", "9" * 4400):
            refused = await service.client.get(path, params={"after": after}, headers=key)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "after")
            assert len(error["message"]) < 300


def whole_description(server: RealServer) -> None:
    """What a real server, whose every graph is warm, says of itself."""
    answer = server.client.get(PATH)
    assert answer.status_code == 200
    info = answer.json()
    check_against_the_schema(info)
    # This server has no connector and no adapters, and its model has no experts.
    absent = {name for name in SECTIONS if info[name] is None}
    assert absent == {"kv_transfer", "lora", "draft_model", "experts"}
    assert info["ranks"] == 1
    assert info["versions"]["vllm"].startswith("0.30")
    assert info["device"]["name"] == "emulated"
    assert info["device"]["kernels"] == "native"
    assert Path(info["device"]["library"]).exists()
    assert info["runtime"]["threads"] >= 1
    assert info["model"]["dtype"] == "float32"
    assert info["model"]["weight_bytes"] > 0
    assert info["limits"] == {"max_model_len": 256, "max_num_seqs": 4, "max_num_batched_tokens": 64}
    assert info["buckets"]["decode"] == [1, 2, 4]
    assert max(info["buckets"]["prefill"]) == 64
    assert [group["kind"] for group in info["kv"]["groups"]] == ["paged"]
    assert info["kv"]["groups"][0]["block_size"] == 16
    assert info["kv"]["bytes"] == server.metric('rbln_device_memory_bytes{kind="kv"')
    names = {graph["name"] for graph in info["graphs"]}
    assert {"decode-1", "decode-2", "decode-4", "prefill-64"} <= names
    assert all(graph["state"] == "done" for graph in info["graphs"])
    cache = info["cache"]
    assert cache["hits"] + cache["misses"] >= len(names)
    assert cache["entries"] > 0
    assert set(info["timings"]["phases"]) == {"init", "load", "compile", "warmup"}
    assert info["timings"]["ready_after_s"] > 0
    assert info["tools"] == {"prompt": "template", "parser": "hermes", "reason": "it names them"}
    assert info["settings"]["rbln"]["kv_cache_pages"] == "on_demand"


def traffic_of_the_last_minutes(server: RealServer) -> None:
    """A real server's samples have what a request made the engine do."""

    def samples(after: int = 0) -> list[Sample]:
        answer = server.client.get(f"{PATH}/history", params={"after": after})
        return TypeAdapter(list[Sample]).validate_python(answer.json()["samples"])

    latest = max((sample.number for sample in samples()), default=0)
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 6, "ignore_eos": True}
    server.client.post("/v1/completions", json=body).raise_for_status()
    give_up = time.monotonic() + 60
    while sum(sample.output_tokens for sample in samples(latest)) < 6:
        assert time.monotonic() < give_up, samples()
        time.sleep(0.1)
    taken = samples(latest)
    busy = [sample for sample in taken if sample.output_tokens]
    assert sum(sample.prompt_tokens for sample in taken) > 0
    assert sum(sample.output_tokens for sample in taken) <= server.metric(
        "vllm:generation_tokens_total"
    )
    prefill = [sample.prefill_padding for sample in taken if sample.prefill_padding is not None]
    decode = [sample.decode_padding for sample in taken if sample.decode_padding is not None]
    assert all(0 <= share <= 1 for share in prefill + decode)
    # A request alone fills its decode batch; its prompt does not fill a chunk of 64 tokens. The
    # engine counts a step before vLLM counts its tokens: a sample may be taken between the two.
    assert max(prefill) > 0
    assert time.time() - 60 < busy[0].at < time.time() + 1
    assert 4 < busy[0].seconds < 60


# -------------------------------------------------------------------------------------------- admin
CHAT = "/v1/chat/completions"
DRAIN, UNDRAIN = "/admin/drain", "/admin/undrain"


async def busy(service: Running) -> asyncio.Task[httpx.Response]:
    task = asyncio.create_task(service.client.post(CHAT, json={"do": "wait", "stream": True}))
    await service.until("rbln_serve_in_flight_requests")
    return task


async def test_a_drain_refuses_new_work_and_finishes_the_old(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        stream = await busy(service)
        answer = await service.client.post(DRAIN)
        assert (answer.status_code, answer.json()["status"]) == (202, "draining")
        assert answer.json()["in_flight"] == 1
        ready = await service.client.get("/readyz")
        assert (ready.status_code, ready.json()["reason"]) == (503, "POST /admin/drain")
        assert (await service.client.get("/livez")).status_code == 200
        refused = await service.client.post(CHAT, json={"do": "answer"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        service.frontend.go_on.set()
        assert (await stream).text.endswith("data: [DONE]\n\n")
        again = await service.client.post(DRAIN, json={"wait": True})
        assert (again.status_code, again.json()["in_flight"]) == (200, 0)
        assert not service.exit_code.done()
        back = await service.client.post(UNDRAIN)
        assert (back.status_code, back.json()["status"]) == (200, "ready")
        assert (await service.client.get("/readyz")).status_code == 200
        assert (await service.client.post(CHAT, json={"do": "answer"})).status_code == 200
        assert (await service.client.post(UNDRAIN)).status_code == 200


async def test_a_drain_can_wait_for_the_last_byte(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        stream = await busy(service)
        early = await service.client.post(DRAIN, json={"wait": True, "timeout_s": 0.1})
        assert (early.status_code, early.json()["in_flight"]) == (202, 1)
        waiting = asyncio.create_task(service.client.post(DRAIN, json={"wait": True}))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        service.frontend.go_on.set()
        assert (await waiting).status_code == 200
        await stream


async def test_a_signal_ends_what_an_admin_began(tmp_path: Path) -> None:
    async with running(tmp_path, drain_timeout_s=60) as service:
        stream = await busy(service)
        await service.client.post(DRAIN)
        service.signal()
        while (await service.client.get("/readyz")).json()["reason"] != "SIGTERM":
            await asyncio.sleep(0.01)
        back = await service.client.post(UNDRAIN)
        assert (back.status_code, back.json()["error"]["code"]) == (503, "draining")
        assert (await service.client.post(DRAIN)).status_code == 202
        service.frontend.go_on.set()
        await stream
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 5) == 0


async def test_the_death_of_a_drained_engine_is_still_reported(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        await service.client.post(DRAIN)
        service.launcher.engine.death = "engine process ended with exit code -9"
        while (await service.client.get("/readyz")).json()["status"] != "dead":
            await asyncio.sleep(0.01)
        refused = await service.client.post(UNDRAIN)
        assert refused.json()["error"]["code"] == "engine_failed"
        assert await asyncio.wait_for(asyncio.shield(service.exit_code), 5) == 1


async def test_a_service_that_starts_cannot_be_drained(tmp_path: Path) -> None:
    async with running(tmp_path, ScriptedLauncher()) as service:
        refused = await service.client.post(DRAIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "not_ready")


BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"wait": 1}, "invalid_type", "wait"),
    ({"wait": True, "timeout_s": "5"}, "invalid_type", "timeout_s"),
    ({"wait": True, "timeout_s": True}, "invalid_type", "timeout_s"),
    ({"wait": True, "timeout_s": 0}, "invalid_value", "timeout_s"),
    ({"wait": True, "timeout_s": 3601}, "invalid_value", "timeout_s"),
    ({"timeout_s": 5}, "invalid_value", "timeout_s"),
    ({"waits": True}, "unknown_field", "waits"),
]


@pytest.mark.parametrize(("body", "code", "param"), BAD)
async def test_a_wrong_wish_drains_nothing(
    tmp_path: Path, body: dict[str, Any], code: str, param: str
) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(DRAIN, json=body)
        assert answer.status_code == 400
        assert (answer.json()["error"]["code"], answer.json()["error"]["param"]) == (code, param)
        assert (await service.client.get("/readyz")).status_code == 200


# ------------------------------------------------------------------------------------------- models
class SeveralModels(ScriptedFrontend):
    """Serves four models."""

    async def models(self) -> list[JsonObject]:
        return [{"id": name, "object": "model"} for name in "abcd"]


@pytest.mark.parametrize(
    ("params", "listed"),
    [
        ({}, "abcd"),
        ({"after_id": "b"}, "cd"),
        ({"before_id": "c"}, "ab"),
        ({"after_id": "a", "before_id": "d"}, "bc"),
        ({"after_id": "c", "before_id": "b"}, ""),
        ({"after_id": "b", "before_id": "b"}, ""),
    ],
)
async def test_pages_are_cut_by_both_ends(
    tmp_path: Path, params: dict[str, str], listed: str
) -> None:
    launcher = ScriptedLauncher(engine=ScriptedEngine(SeveralModels()))
    launcher.launched.set()
    async with running(tmp_path, launcher) as service:
        headers = {"anthropic-version": "2023-06-01"}
        answer = await service.client.get("/v1/models", params=params, headers=headers)
        assert answer.status_code == 200, answer.text
        assert "".join(model["id"] for model in answer.json()["data"]) == listed


# ------------------------------------------------------------------------------------- prefix cache
RESET = "/reset_prefix_cache"


async def test_running_requests_are_preempted_on_request_only(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        queries = ("", "?reset_running_requests=true", "?reset_external=true")
        for query, success in zip(queries, (False, True, False), strict=True):
            answer = await service.client.post(RESET + query)
            assert (answer.status_code, answer.json()) == (200, {"success": success})
        assert service.frontend.resets == [(False, False), (True, False), (False, True)]


@pytest.mark.parametrize("name", ["reset_running_requests", "reset_external"])
async def test_other_values_are_refused(tmp_path: Path, name: str) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.post(f"{RESET}?{name}=yes")
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == (name, "invalid_value")
        assert service.frontend.resets == []


async def test_it_needs_the_admin_key(tmp_path: Path) -> None:
    async with running(tmp_path, admin_key=("secret-of-admins",), api_key=("sk",)) as service:
        assert (await service.client.post(RESET)).status_code == 401
        with_key = {"authorization": "Bearer sk"}
        assert (await service.client.post(RESET, headers=with_key)).status_code == 403


async def test_ping_is_a_probe_and_load_counts_requests(tmp_path: Path) -> None:
    launcher = ScriptedLauncher()
    async with running(tmp_path, launcher) as service:
        assert (await service.client.get("/ping")).status_code == 503
    async with running(tmp_path) as service:
        for method in ("GET", "POST"):
            assert (await service.client.request(method, "/ping")).status_code == 200
        assert (await service.client.get("/load")).json() == {"server_load": 0}
        stream = asyncio.create_task(
            service.client.post("/v1/chat/completions", json={"do": "wait", "stream": True})
        )
        while (await service.client.get("/load")).json() != {"server_load": 1}:
            await asyncio.sleep(0.01)
        service.frontend.go_on.set()
        await stream


# ------------------------------------------------------------------------------------------ profile
START, STOP = "/start_profile", "/stop_profile"


async def test_a_profile_is_started_and_stopped(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        service.frontend.profiler = profiler = ScriptedProfiler()
        for path in (START, STOP):
            answer = await service.client.post(path)
            assert (answer.status_code, answer.content) == (200, b"")
        assert profiler.calls == ["start", "stop"]


async def test_without_a_profiler_it_says_how_to_get_one(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        for path in (START, STOP):
            answer = await service.client.post(path)
            assert answer.status_code == 400
            error = answer.json()["error"]
            assert error["code"] == "unsupported_operation"
            assert "RBLN_PROFILER=1" in error["message"]


async def test_it_is_for_who_may_change_the_server(tmp_path: Path) -> None:
    async with running(tmp_path, admin_key=("secret-of-admins",), api_key=("sk",)) as service:
        service.frontend.profiler = profiler = ScriptedProfiler()
        with_key = {"authorization": "Bearer sk"}
        assert (await service.client.post(START)).status_code == 401
        assert (await service.client.post(START, headers=with_key)).status_code == 403
        assert not profiler.calls


@pytest.mark.engine
def test_a_real_engine_writes_what_it_ran(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    cache = {"rbln": {"profiler": True, "cache_root": str(tmp_path / "cache"), "kernels": "aten"}}
    # A cache of its own, so few graphs.
    flags = ("--max-num-seqs", "1", "--max-num-batched-tokens", "16")
    flags += ("--additional-config", json.dumps(cache))
    with RealServer(checkpoints("llama"), tmp_path, *flags) as server:
        server.until_ready()
        assert server.client.post(START).status_code == 200
        body = {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}
        assert server.client.post("/v1/completions", json=body).status_code == 200
        assert server.client.post(STOP).status_code == 200
        (trace,) = (tmp_path / "cache" / "rbln" / "profile").iterdir()
        assert json.loads(trace.read_text())["traceEvents"]


# ------------------------------------------------------------------------------------------ console
FILES = sorted(path.name for path in FOLDER.iterdir() if path.is_file())
LIBRARIES = json.loads((FOLDER / "vendor" / "packages.json").read_text(encoding="utf-8"))


async def test_the_page_is_there_before_the_engine_and_without_a_key(tmp_path: Path) -> None:
    async with running(tmp_path, ScriptedLauncher(), api_key=["secret"]) as service:
        page = await service.client.get("/")
        assert page.status_code == 200
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        policy = page.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", "script-src 'self'", "connect-src 'self'"} <= set(policy)
        assert {"require-trusted-types-for 'script'", "trusted-types dompurify"} <= set(policy)
        assert not re.search("unsafe|[*]|https?:|data:|blob:", " ".join(policy))
        for name in re.findall(r'(?:href|src)="console/([^"]+)"', page.text):
            assert (await service.client.get(f"/console/{name}")).status_code == 200
        # What it shows is guarded as ever.
        assert (await service.client.get("/v1/server_info")).status_code == 401


async def test_it_can_be_switched_off(tmp_path: Path) -> None:
    async with running(tmp_path, console=False) as service:
        for path in ("/", "/console/main.js"):
            answer = await service.client.get(path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_found")
        documented = (await service.client.get("/openapi.json")).json()["paths"]
        assert "/metrics" in documented
        assert "/" not in documented


async def test_a_file_that_did_not_change_is_not_sent_again(tmp_path: Path) -> None:
    async with running(tmp_path) as service:
        first = await service.client.get("/console/main.js")
        tag = {"if-none-match": first.headers["etag"]}
        again = await service.client.get("/console/main.js", headers=tag)
        assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize(
    "path",
    [
        "/console/none.js",
        "/console/vendor/packages.json",
        "/console/vendor",
        "/console/..%2fapp.py",
        "/console/",
    ],
)
async def test_nothing_else_is_sent(tmp_path: Path, path: str) -> None:
    async with running(tmp_path) as service:
        answer = await service.client.get(path)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "route_not_found")


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_host_or_writes_markup(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    hosts = set(re.findall(r"https?://[^\s\"')]+", text))
    assert hosts <= {"http://www.w3.org/2000/svg"}
    assert "innerHTML" not in text
    assert not re.search(r"\son\w+=|<style|javascript:", text)


def test_libraries_are_the_published_files_with_their_licences() -> None:
    folder = FOLDER / "vendor"
    files = {name: of for library in LIBRARIES for name, of in library["files"].items()}
    assert sorted(files) == sorted(p.name for p in folder.iterdir() if p.suffix != ".json")
    for name, of in files.items():
        assert hashlib.sha256((folder / name).read_bytes()).hexdigest() == of["sha256"], name
    for library in LIBRARIES:
        assert re.fullmatch(r"[0-9]+([.][0-9]+){2}", library["version"])
        assert library["integrity"].startswith("sha512-")
        assert any("LICENSE" in name for name in library["files"])
