"""`serve ORG/REPO` downloads from a hub, and needs none afterwards."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.hub_server import HubServer
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine


def test_a_model_of_a_hub_is_served(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    hub = HubServer()
    hub.add("org/tiny", checkpoints("llama"))
    with hub.running():
        environment = {
            "HF_ENDPOINT": hub.url,
            "HF_HUB_CACHE": str(tmp_path / "hub"),
            "HF_HUB_OFFLINE": "0",
        }
        with RealServer(Path("org/tiny"), tmp_path, environment=environment) as server:
            server.until_ready()
            body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
            answer = server.client.post("/v1/completions", json=body).json()
            assert answer["usage"]["completion_tokens"] == 4
            root = server.client.get("/v1/models").json()["data"][0]["root"]
    snapshot = tmp_path / "hub/models--org--tiny/snapshots" / hub.commit("org/tiny", "main")
    assert root == str(snapshot)
    assert hub.ranges("model.safetensors") == [None]
