"""The Ray Serve application in a real Ray, where that is installed."""

import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from tests.architecture.source_tree import ROOT
from tests.checkpoints import CheckpointCache
from tests.kernel_cache import share_kernels
from tests.ports import free_port
from tests.server.real_server import FLAGS

_RUN = """
import sys
import ray
from ray import serve
from examples.ray_serve import build
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
serve.run(build({"arguments": sys.argv[2], "start_s": 500}))
print("RUNNING", flush=True)
sys.stdin.read()
serve.shutdown()
"""


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.wide
@pytest.mark.timeout(600)
def test_replicas_answer_and_stream(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    pytest.importorskip("ray.serve", reason="ray[serve] is not installed")
    port = free_port()
    environment = {
        **os.environ,
        "VLLM_CACHE_ROOT": str(share_kernels(tmp_path / "cache")),
        "PYTHONPATH": str(ROOT),
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    arguments = " ".join([str(checkpoints("llama")), *FLAGS])
    with subprocess.Popen(
        [sys.executable, "-c", _RUN, str(port), arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        assert "RUNNING\n" in iter(process.stdout.readline, ""), "it ended"
        client = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60)
        body = {"model": FLAGS[1], "prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
        answer = client.post("/v1/completions", json=body)
        assert answer.json()["usage"]["completion_tokens"] == 5, answer.text
        with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as stream:
            lines = [line for line in stream.iter_lines() if line.startswith("data: ")]
        assert lines[-1] == "data: [DONE]" and len(lines) > 2
        assert client.get("/v1/absent").json()["error"]["code"] == "route_not_found"
        process.stdin.close()
        begun = time.monotonic()
        assert process.wait(90) == 0
        assert time.monotonic() - begun < 60
