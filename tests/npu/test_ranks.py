"""Engines of two ranks over the double: each sees its own NPU, and each keeps its own binaries."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers import vocab_parallel_embedding as layers

from rbln_backend.devices.layers import RblnEmbedding
from rbln_backend.host.resources import core_budget
from tests.checkpoints import CheckpointCache
from tests.draft_checkpoints import FITTED
from tests.engine.script import run_script
from tests.mtp_checkpoints import MtpMaker
from tests.npu.engines import (
    ONE_CHUNK,
    OPTIONS,
    SHARED,
    THREE_CHUNKS,
    TWO_BLOCKS,
    WHOLE_CHUNK,
    Job,
    run,
)
from tests.npu.test_drafts import CONTEXT, drafted_by_layer, drafted_by_model, served
from tests.npu.test_engines import config_of
from tests.sdk_double.launch import FOLDER, double_environment
from tests.server.real_server import RealServer
from tests.vendor.environment import torch_rbln_variables


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "async_scheduling": True},
        {"pipeline_parallel_size": 2},
    ],
    ids=["tensor", "tensor-in-flight", "pipeline"],
)
def test_two_ranks_answer_as_transformers(
    checkpoints: CheckpointCache, tmp_path: Path, options: dict[str, Any]
) -> None:
    checkpoint = checkpoints("llama", max_position_embeddings=4096)
    job = Job(checkpoint, options, [[ONE_CHUNK, TWO_BLOCKS], [SHARED]])
    cold = run([job], tmp_path, devices=4)
    assert cold.answers == [job.expected()]
    calls = [call for call in cold.calls("environment") if call["when"] == "open"]
    opened = [call["variables"] for call in calls]
    for call in calls:
        wanted = core_budget().threads(int(call["variables"]["LOCAL_RANK"]), 2)
        assert (call["threads"], call["variables"]["RBLN_NUM_THREADS"]) == (wanted, str(wanted))
    ranks = {variables["LOCAL_RANK"]: variables for variables in opened}
    assert {rank: variables["RBLN_VISIBLE_DEVICES"] for rank, variables in ranks.items()} == {
        "0": "0",
        "1": "1",
    }
    assert {variables["WORLD_SIZE"] for variables in ranks.values()} == {"2"}
    ops = [call["ops"] for call in cold.calls("compile") if call["sdk_ops"]]
    reduced = {counts.get("_c10d_functional::all_reduce", 0) for counts in ops}
    assert not any("Tensor.masked_fill_" in counts for counts in ops)
    layers = config_of(job)["num_hidden_layers"]
    expected = {2 * layers} if "tensor_parallel_size" in options else {0}
    assert reduced == expected, "none for the tokens, whose table each rank has"
    assert not cold.calls("ccl"), "without torch-rbln ranks talk over gloo"
    warm = run([job], tmp_path, devices=4)
    assert warm.answers == cold.answers
    assert warm.calls("compile")
    assert all(call["hit"] for call in warm.calls("compile"))


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("device", "served", "own", "rows"),
    [
        ("rebel", False, False, 1024),
        ("rebel", True, True, 512),
        # The layer of a draft model reads the served model's.
        ("rebel", True, False, 512),
        ("emulated", False, False, 512),
    ],
)
def test_a_rank_has_the_whole_embedding_unless_it_is_the_head(
    sdk: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    *,
    served: bool,
    own: bool,
    rows: int,
) -> None:
    assert sdk
    for name, value in (("rank", 1), ("world_size", 2)):
        monkeypatch.setattr(layers, f"get_tensor_model_parallel_{name}", lambda value=value: value)
    config: Any = VllmConfig(additional_config={"rbln": {"device": device}})
    models = [
        SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=tied))
        for tied in (own, served)
    ]
    config.model_config = models[0]
    config.speculative_config = SimpleNamespace(target_model_config=models[1])
    with set_current_vllm_config(config):
        embedding = RblnEmbedding(1000, 8)
    assert len(embedding.weight) == rows


@pytest.mark.engine
@pytest.mark.timeout(900)
@pytest.mark.wide
@pytest.mark.parametrize("auto_port", [None, "0"])
def test_ranks_with_device_tensors_join_groups_of_the_device(
    checkpoints: CheckpointCache, tmp_path: Path, auto_port: str | None
) -> None:
    checkpoint = checkpoints("llama", max_position_embeddings=4096)
    job = Job(checkpoint, {"tensor_parallel_size": 2}, [[ONE_CHUNK, TWO_BLOCKS], [SHARED]])
    environment = torch_rbln_variables()
    environment |= {} if auto_port is None else {"VLLM_RBLN_AUTO_PORT": auto_port}
    ran = run([job], tmp_path, environment=environment, devices=4)
    assert ran.answers == [job.expected()]
    groups = [call for call in ran.calls("ccl") if call["size"] == 2]
    assert {call["rank"] for call in groups} == {"0", "1"}
    assert {call["finds_ports"] for call in groups} == {None if auto_port else "1"}


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("method", [*FITTED, "mtp"])
@pytest.mark.parametrize("ranks", ["tensor", "pipeline"])
def test_two_ranks_with_drafts(
    checkpoints: CheckpointCache, tmp_path: Path, method: str, ranks: str
) -> None:
    """Right drafts save steps; random ones give the same answers in more."""
    options = {f"{ranks}_parallel_size": 2}
    if method == "mtp":
        maker = MtpMaker("glm4_moe", checkpoints, max_position_embeddings=CONTEXT)
        jobs = drafted_by_layer(maker, tmp_path, options, devices=4)
    else:
        jobs = drafted_by_model(served(checkpoints, **options), method, tmp_path, devices=4)
    jobs.assert_steps_saved(devices=4)


# ------------------------------------------------------------------------------------------ service
# The whole service over the double: what an operator sees while the SDK compiles, and after.


FLAGS = ("--block-size", "1024", "--max-model-len", "2048", "--max-num-batched-tokens", "128")


@pytest.mark.engine
@pytest.mark.timeout(400)
def test_compiles_of_the_sdk_are_reported_and_none_follows(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    environment = {
        "PYTHONPATH": str(FOLDER),
        "SDK_DOUBLE_COMPILE_S": "1",
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
    }
    checkpoint = checkpoints("llama", max_position_embeddings=4096)
    # A device of 140 GiB would take as much of this host's memory.
    flags = (*FLAGS, "--num-gpu-blocks-override", "16")
    with RealServer(checkpoint, tmp_path, *flags, environment=environment) as server:
        seen = []
        while server.client.get("/readyz").status_code != 200:
            seen.append(server.client.get("/startupz").json())
            assert server.process.poll() is None, server.log.read_text()
            time.sleep(0.1)
        compiling = [s for s in seen if s["phase"] == "compile"]
        done = {s["graphs"]["done"] for s in compiling}
        assert len(done - {0}) >= 3, "one after another, as they are done"
        assert any(s["eta_s"] and s["eta_s"] >= 1 for s in compiling)
        info = server.client.get("/v1/server_info").json()
        assert info["device"]["name"] == "rebel"
        assert info["device"]["npu"] == "RBLN-CR13"
        graphs = server.client.get("/startupz").json()["graphs"]
        assert graphs["done"] == graphs["total"] > 3
        assert server.metric('rbln_graphs{kind="decode",result="compiled"}') == 3
        spent = server.metric("rbln_compile_seconds_sum")
        assert spent >= graphs["total"]
        body = {"model": "tiny", "prompt": "NPU", "max_tokens": 4, "ignore_eos": True}
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert server.metric("rbln_recompiles_after_warmup_total") == 0


# ---------------------------------------------------------------------------------------- kv leaves
# KV leaves an NPU and comes back: to another server by NIXL, and to files over a restart.
#
# Caches are tensors of torch's device ``rbln``, whose blocks torch copies to host memory and
# back, as in the vendor's ``kv_buffer_device="cpu"``.


SCRIPT = Path(__file__).with_name("transfer_script.py")
NIXL = Path(__file__).parents[1] / "nixl_double"
PROMPTS = [ONE_CHUNK, TWO_BLOCKS, THREE_CHUNKS, WHOLE_CHUNK]
LONG = {"max_position_embeddings": 4096}
LATENT = LONG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def leave(job: Job, folder: Path, *, tier: Path | None = None, **rbln: Any) -> Any:
    """Return what the script prints of ``job``, whose prompts are one batch."""
    settings = {"cache_root": str(folder / "cache")} | rbln
    request = {
        "path": str(job.checkpoint),
        "options": OPTIONS | {"additional_config": {"rbln": settings}} | job.options,
        "prompts": job.batches[0],
        "max_tokens": job.max_tokens,
        "folder": None if tier is None else str(tier),
    }
    variables = double_environment(folder / "calls.jsonl") | torch_rbln_variables()
    variables["PYTHONPATH"] = os.pathsep.join((variables["PYTHONPATH"], str(NIXL)))
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return run_script(SCRIPT, request, variables, timeout_s=900)


@pytest.mark.timeout(1800)
@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize(
    ("arch", "sizes", "options"),
    [("llama", LONG, {}), ("llama", LONG, {"kv_cache_dtype": "fp8"}), ("deepseek_v3", LATENT, {})],
)
def test_another_server_answers(
    checkpoints: CheckpointCache,
    tmp_path: Path,
    arch: str,
    sizes: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """The second time, prefixes are in both servers: one block each is read."""
    path = checkpoints(arch, **sizes)
    scales = ((1.0, 1.0),) * 3 if options else ()
    job = Job(path, options, batches=[PROMPTS], cache_scales=scales)
    *rounds, (first, second) = leave(job, tmp_path)
    assert rounds == [job.expected()[0]] * 2
    assert first % 5 == 0
    assert second == first // 5 * 4


@pytest.mark.timeout(1800)
@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize(
    ("arch", "sizes", "options"),
    [("llama", LONG, {}), ("deepseek_v3", LATENT, {})],
)
def test_files_outlive_the_engine(
    checkpoints: CheckpointCache,
    tmp_path: Path,
    arch: str,
    sizes: dict[str, Any],
    options: dict[str, Any],
) -> None:
    batch = [*PROMPTS, SHARED]
    job = Job(checkpoints(arch, **sizes), options, batches=[batch])
    first, second, cached = leave(job, tmp_path, tier=tmp_path / "tier")
    assert first == second == job.expected()[0]
    assert cached == [(len(prompt) - 1) // 128 * 128 for prompt in batch]


@pytest.mark.timeout(1800)
def test_caches_in_the_runtimes_of_the_sdk_are_refused(
    sdk: ModuleType, checkpoints: CheckpointCache
) -> None:
    """Without torch-rbln, no call copies a block to the host."""
    assert sdk
    options: dict[str, Any] = {"kv_offloading_size": 1, "max_num_batched_tokens": 128}
    options["additional_config"] = {"rbln": {"device": "rebel"}}
    path = checkpoints("llama", max_position_embeddings=4096)
    with pytest.raises(ValidationError, match="device 'rebel' without torch-rbln"):
        EngineArgs(str(path), **options).create_engine_config()
