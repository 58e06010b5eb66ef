"""A folder of the hub's library, as downloads leave it."""

from __future__ import annotations

import json
from pathlib import Path

import huggingface_hub.constants
import pytest


class Hub:
    """Snapshots that have been downloaded; nothing else can be."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, name: str, commit: str = "1" * 40, **config: object) -> None:
        repository = self._folder / f"models--{name.replace('/', '--')}"
        snapshot = repository / "snapshots" / commit
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text(json.dumps(config))
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / "main").write_text(commit)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return Hub(tmp_path / "hub")
