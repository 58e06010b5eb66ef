"""The download container fetches a model that the server's environment finds without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.hub_server import HubServer
from tests.kubernetes.chart import Document, of_kind, render, server
from tests.kubernetes.value_sets import DOWNLOAD

pytestmark = pytest.mark.engine


def test_the_server_finds_what_the_container_downloaded(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    pod = server(DOWNLOAD).pod
    download, waiting = pod["initContainers"]
    hub = HubServer(token="secret")
    hub.add("org/tiny", checkpoints("llama"))
    with hub.running():
        # What the Secret and `download.endpoint` give.
        given = {"HF_TOKEN": "secret", "HF_ENDPOINT": hub.url}
        first = _run(download["args"], {**_environment(download, tmp_path), **given})
    assert first.returncode == 0, first.stderr
    main = pod["containers"][0]
    assert main["args"][:3] == ["org/tiny", "--revision", "main"]
    assert {"name": "models", "mountPath": "/models", "readOnly": True} in main["volumeMounts"]
    again = _run(["fetch", *main["args"][:3]], _environment(main, tmp_path))
    assert again.returncode == 0, again.stderr
    assert again.stdout == first.stdout
    # The container that waits for the Job names the same model.
    assert waiting["args"] == main["args"]


def test_the_job_downloads_too_and_only_downloads_have_the_token() -> None:
    job = of_kind(render(DOWNLOAD), "Job")["spec"]["template"]["spec"]
    assert [one["name"] for one in job["initContainers"]] == ["download-model"]
    (token,) = [one for one in job["initContainers"][0]["env"] if one["name"] == "HF_TOKEN"]
    assert token["valueFrom"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert "HF_TOKEN" not in server(DOWNLOAD).env
    kept = {"model": {"download": {**DOWNLOAD["model"]["download"], "claimName": "weights"}}}
    volumes = {v["name"]: v for v in server({**DOWNLOAD, **kept}).pod["volumes"]}
    assert volumes["models"]["persistentVolumeClaim"] == {"claimName": "weights"}


def _environment(container: Document, folder: Path) -> dict[str, str]:
    """The container's variables with paths of this machine."""
    own = {one["name"]: one["value"] for one in container["env"] if "value" in one}
    own |= {"HF_HUB_CACHE": str(folder / own["HF_HUB_CACHE"][1:]), "HOME": str(folder)}
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("VLLM_", "RBLN_", "HF_"))}
    return {**kept, **own, "VLLM_CACHE_ROOT": str(folder / "cache"), "VLLM_NO_USAGE_STATS": "1"}


def _run(args: list[str], env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "server", *args]
    return subprocess.run(
        command, env=env, capture_output=True, text=True, check=False, timeout=120
    )
