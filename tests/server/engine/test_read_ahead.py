"""Which files are read ahead."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rbln_backend.host.resources import HostMemory
from server.engine import weight_files as module
from server.engine.weight_files import read_ahead


@pytest.fixture
def model(tmp_path: Path) -> Path:
    for name in ("model-1.safetensors", "model-2.safetensors", "config.json"):
        (tmp_path / name).write_bytes(bytes(1000))
    return tmp_path


def test_all_weights_of_a_folder_are_advised(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    advised: list[tuple[str, int]] = []

    def advise(descriptor: int, offset: int, length: int, advice: int) -> None:
        assert (offset, length) == (0, 0)
        advised.append((str(Path(f"/proc/self/fd/{descriptor}").readlink()), advice))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    files = read_ahead([str(model), "--max-num-seqs", "4"])
    assert [path.name for path in files] == ["model-1.safetensors", "model-2.safetensors"]
    assert advised == [(str(path), os.POSIX_FADV_WILLNEED) for path in files]


def test_others_are_left_alone(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for argv in ([], ["--model", "x"], ["owner/model"], [str(model), "--load-format", "dummy"]):
        assert read_ahead(argv) == []
    monkeypatch.setattr(module, "host_memory", lambda: HostMemory(9000, 3999, "a group"))
    assert read_ahead([str(model)]) == []
    monkeypatch.setattr(module, "host_memory", lambda: HostMemory(9000, 4001, "a group"))
    assert len(read_ahead([str(model)])) == 2
