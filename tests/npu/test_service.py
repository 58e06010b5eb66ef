"""The whole service over the double: what an operator sees while the SDK compiles, and after."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.sdk_double.launch import FOLDER
from tests.server.real_server import RealServer

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

FLAGS = ("--block-size", "1024", "--max-model-len", "2048", "--max-num-batched-tokens", "128")


def test_compiles_of_the_sdk_are_reported_and_none_follows(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    environment = {
        "PYTHONPATH": str(FOLDER),
        "SDK_DOUBLE_COMPILE_S": "2",
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
            time.sleep(0.2)
        compiling = [s for s in seen if s["phase"] == "compile"]
        done = {s["graphs"]["done"] for s in compiling}
        assert len(done - {0}) >= 3, "one after another, as they are done"
        assert any(s["eta_s"] and s["eta_s"] >= 2 for s in compiling)
        info = server.client.get("/v1/server_info").json()
        assert info["device"]["name"] == "rebel"
        assert info["device"]["npu"] == "RBLN-CR13"
        graphs = server.client.get("/startupz").json()["graphs"]
        assert graphs["done"] == graphs["total"] > 3
        assert server.metric('rbln_graphs{kind="decode",result="compiled"}') == 3
        spent = server.metric("rbln_compile_seconds_sum")
        assert spent >= 2 * graphs["total"]
        body = {"model": "tiny", "prompt": "NPU", "max_tokens": 4, "ignore_eos": True}
        answer = server.client.post("/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["completion_tokens"] == 4
        assert server.metric("rbln_recompiles_after_warmup_total") == 0
