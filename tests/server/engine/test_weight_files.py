"""Safetensors that are missing, cut off or damaged are found from their headers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from server.engine.weight_files import WeightFiles, check_weight_files, refuse_damaged_weights
from server.frontend import LaunchError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    names = {f"model-{i}.safetensors": f"layer.{i}" for i in (1, 2)}
    for name, tensor in names.items():
        save_file({tensor: torch.zeros(8, 8, dtype=torch.bfloat16)}, tmp_path / name)
    index = {"weight_map": {tensor: name for name, tensor in names.items()}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return tmp_path


def found(folder: Path, dtype: str = "bfloat16") -> WeightFiles:
    return check_weight_files(str(folder), dtype)


def test_whole_files_are_no_problem(folder: Path) -> None:
    assert found(folder) == WeightFiles([], [], "bfloat16")
    assert check_weight_files("some-org/some-model", "bfloat16") == WeightFiles()


def test_a_missing_file_is_named(folder: Path) -> None:
    (folder / "model-2.safetensors").unlink()
    (problem,) = found(folder).problems
    assert "2 files, of which 1 are missing: model-2.safetensors; fetch them" in problem


def test_a_download_that_was_cut_off(folder: Path) -> None:
    path = folder / "model-1.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-16])
    (problem,) = found(folder).problems
    assert f"{len(data) - 16:,} bytes, its header says {len(data):,}" in problem


def test_a_hole_of_the_right_length(folder: Path) -> None:
    path = folder / "model-2.safetensors"
    save_file({"layer.2": torch.ones(1 << 10, 1 << 10, dtype=torch.bfloat16)}, path)
    size = path.stat().st_size
    assert found(folder).problems == []
    os.truncate(path, size // 2)
    os.truncate(path, size)
    (problem,) = found(folder).problems
    assert "model-2.safetensors has no data from byte " in problem


def test_a_tensor_in_two_files(folder: Path) -> None:
    save_file({"layer.1": torch.zeros(8, 8)}, folder / "model-2.safetensors")
    (problem,) = found(folder).problems
    assert problem.startswith("layer.1 is in model-1.safetensors and in model-2.safetensors")


@pytest.mark.parametrize("content", [b"", b"\x00" * 4, b"\xff" * 64, b"\x02" + b"\x00" * 7 + b"[]"])
def test_a_header_that_is_none(folder: Path, content: bytes) -> None:
    (folder / "model-1.safetensors").write_bytes(content)
    (problem,) = found(folder).problems
    assert problem.startswith("model-1.safetensors is damaged: ")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"shape": [8, 9]}, "invalid shape, data type, or offset"),
        ({"data_offsets": [-5, 128]}, "-5"),
        ({"dtype": "B7"}, "B7"),
    ],
)
def test_a_header_that_means_nothing(folder: Path, change: dict[str, Any], words: str) -> None:
    path = folder / "model-1.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header["layer.1"] |= change
    changed = json.dumps(header).encode()
    path.write_bytes(len(changed).to_bytes(8, "little") + changed + data[8 + length :])
    (problem,) = found(folder).problems
    assert problem.startswith("model-1.safetensors is damaged: ")
    assert words in problem


def test_damaged_weights_are_refused_before_an_engine_is_built(folder: Path) -> None:
    refuse_damaged_weights(str(folder), "auto")
    for name in ("model-1", "model-2"):
        (folder / f"{name}.safetensors").write_bytes(b"\x93NUMPY" + b"x" * 200)
    with pytest.raises(LaunchError, match=r"^model-1.* do.* begin .*; model-2.*; fetch it again$"):
        refuse_damaged_weights(str(folder), "auto")
    refuse_damaged_weights(str(folder), "dummy")


def test_an_index_that_is_none(folder: Path) -> None:
    (folder / "model.safetensors.index.json").write_text("[]")
    (problem,) = found(folder).problems
    assert "cannot be read" in problem


def test_a_conversion_and_a_folder_without_weights_are_warned_of(
    folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    (warning,) = found(folder, "float32").warnings
    assert "stored as bfloat16 and converted to float32" in warning
    (warning,) = found(tmp_path_factory.mktemp("empty")).warnings
    assert "has no weights" in warning
