"""`/v1/server_info` while nothing, a part and all is known, and its documented schema."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from rbln_backend.reports.info import (
    SECTIONS,
    DescriptionWriter,
    DraftModelInfo,
    LimitsInfo,
)
from rbln_backend.reports.progress import ProgressWriter
from server.observability.traffic import Sample
from server.routes.server_info import SERVER_FIELDS
from tests.server.real_server import RealServer
from tests.server.scripted import ScriptedEngine, ScriptedFrontend, ScriptedLauncher, running

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
    async with running(tmp_path, launcher, death_linger_s=5) as service:
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
    assert [name for name in SECTIONS if info[name] is None] == [
        "kv_transfer",
        "lora",
        "draft_model",
        "experts",
    ]
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
