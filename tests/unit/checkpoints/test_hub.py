"""Downloads from a stand-in of a hub: resumed, verified, by token and revision, offline."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import huggingface_hub.constants
import pytest

from rbln_backend.checkpoints.folders import fetch, local_or_fetched
from rbln_backend.errors import CheckpointError
from rbln_backend.settings import HubSettings, hub_settings
from tests.hub_server import HubServer

WEIGHTS, LARGE = os.urandom(1 << 20), os.urandom(24 << 20)
FILES = {
    "config.json": b'{"model_type": "llama"}',
    "tokenizer.json": b"{}",
    "model.safetensors": WEIGHTS,
    "pytorch_model.bin": b"not wanted",
    "modeling_x.py": b"not wanted",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    # The tests run offline; the library reads the variable when it is imported.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    with HubServer(repos={"org/tiny": {"main": dict(FILES)}}).running() as running:
        yield running


@pytest.fixture
def settings(hub: HubServer, tmp_path: Path) -> HubSettings:
    return HubSettings(endpoint=hub.url, cache=tmp_path / "hub")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_checkpoint_is_downloaded_once(
    hub: HubServer, settings: HubSettings, tmp_path: Path
) -> None:
    folder = fetch("org/tiny", tmp_path, None, settings)
    assert names(folder) == {"config.json", "tokenizer.json", "model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert not list((tmp_path / "hub").rglob("*partial*"))
    downloads = len(hub.ranges("model.safetensors"))
    assert downloads == 1
    assert fetch("org/tiny", tmp_path, None, settings) == folder
    # Without a network from now on.
    assert len(hub.ranges("model.safetensors")) == downloads
    requests = len(hub.requests)
    offline = replace(settings, is_offline=True)
    assert fetch("org/tiny", tmp_path, None, offline) == folder
    assert local_or_fetched("org/tiny", None, settings, may_fetch=True) == folder
    assert len(hub.requests) == requests


def test_a_connection_that_breaks_is_resumed(
    hub: HubServer, settings: HubSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    hub.repos["org/tiny"]["main"]["model.safetensors"] = LARGE
    hub.cut_after = 16 << 20
    folder = fetch("org/tiny", tmp_path, None, settings)
    assert (folder / "model.safetensors").read_bytes() == LARGE
    # The library writes pieces of 10 MiB.
    assert hub.ranges("model.safetensors") == [None, f"bytes={10 << 20}-"]


def test_a_killed_process_is_resumed_by_the_next_one(hub: HubServer, tmp_path: Path) -> None:
    hub.repos["org/tiny"]["main"]["model.safetensors"] = LARGE
    hub.hold_after = 16 << 20
    environ = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"}
    environ |= {
        "HF_ENDPOINT": hub.url,
        "HF_HUB_CACHE": str(tmp_path / "hub"),
        "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
    }
    command = [sys.executable, "-m", "server", "fetch", "org/tiny"]
    killed = subprocess.Popen(command, env=environ, stderr=subprocess.DEVNULL)
    assert hub.holding.wait(60)
    (partial,) = _until_written(tmp_path / "hub")
    killed.send_signal(signal.SIGKILL)
    killed.wait(60)
    written = partial.stat().st_size
    assert written > 0
    hub.hold_after = None
    hub.released.set()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert (folder / "model.safetensors").read_bytes() == LARGE
    assert hub.ranges("model.safetensors") == [None, f"bytes={written}-"]
    # Progress, and where it goes on.
    assert "Resuming model.safetensors" in done.stderr
    assert "25/25" in done.stderr


def _until_written(cache: Path) -> list[Path]:
    """Return the partial file once it has bytes."""
    while True:
        found = [path for path in cache.rglob("*.partial") if path.stat().st_size]
        if found:
            return found


def test_a_damaged_download_is_not_kept(
    hub: HubServer, settings: HubSettings, tmp_path: Path
) -> None:
    fetch("org/tiny", tmp_path, None, settings)
    (blob,) = (p for p in (tmp_path / "hub").rglob("blobs/*") if p.stat().st_size == len(WEIGHTS))
    # The start of another file, as a broken disk leaves it.
    blob.with_name(f"{blob.name}.partial").write_bytes(b"x" * 100)
    blob.unlink()
    with pytest.raises(CheckpointError, match="has the SHA-256"):
        fetch("org/tiny", tmp_path, None, settings)
    assert fetch("org/tiny", tmp_path, None, settings)
    assert hub.ranges("model.safetensors") == [None, "bytes=100-", None]


def test_a_revision_and_a_token_are_sent(
    hub: HubServer, settings: HubSettings, tmp_path: Path
) -> None:
    hub.repos["org/tiny"]["v1"] = {**FILES, "config.json": b'{"v": 1}'}
    hub.token = "secret"
    with pytest.raises(CheckpointError, match="is private: HF_TOKEN sets a token"):
        fetch("org/tiny", tmp_path, "v1", settings)
    allowed = replace(settings, token="secret")
    folder = fetch("org/tiny", tmp_path, "v1", allowed)
    assert json.loads((folder / "config.json").read_text()) == {"v": 1}
    with pytest.raises(CheckpointError, match="has no revision 'v2'"):
        fetch("org/tiny", tmp_path, "v2", allowed)
    hub.gated.add("org/tiny")
    with pytest.raises(CheckpointError, match=f"is gated: accept its licence at {hub.url}"):
        fetch("org/tiny", tmp_path, None, allowed)


def test_errors_name_the_hub_and_what_to_do(
    hub: HubServer, settings: HubSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match=f"org/none is not at {hub.url}"):
        fetch("org/none", tmp_path, None, settings)
    offline = replace(settings, is_offline=True)
    with pytest.raises(CheckpointError, match="run `rbln-serve fetch org/tiny`"):
        fetch("org/tiny", tmp_path, None, offline)
    assert local_or_fetched("org/tiny", None, offline, may_fetch=True) is None
    assert local_or_fetched("org/tiny", None, settings, may_fetch=False) is None
    full = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: full)
    with pytest.raises(CheckpointError, match="HF_HUB_CACHE names another folder"):
        fetch("org/tiny", tmp_path, None, settings)


def test_the_variables_of_the_library_are_read() -> None:
    assert hub_settings({}) == HubSettings()
    variables = {
        "HF_ENDPOINT": "https://mirror.example/",
        "HF_TOKEN": "secret",
        "HF_HUB_CACHE": "/models",
        "HF_HUB_OFFLINE": "true",
    }
    found = hub_settings(variables)
    assert found == HubSettings(
        endpoint="https://mirror.example", token="secret", cache=Path("/models"), is_offline=True
    )
    assert "secret" not in repr(found)
    assert hub_settings({"TRANSFORMERS_OFFLINE": "1"}).is_offline
