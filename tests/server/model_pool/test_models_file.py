"""The file of `--models`, and what cannot be used with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from server.commands.cli import main
from server.model_pool.models_file import read_models_file
from server.settings import SettingsError

TWO = """
memory_gib: 2
models:
  - {name: a, path: /m/a, flags: "--max-num-seqs 4 --lora-root '/x y'", pinned: true}
  - {name: org/b, path: /m/b, flags: [--max-num-seqs, 8]}
"""


def _file(folder: Path, text: str, name: str = "models.yaml") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_flags_are_words_or_a_command_line(tmp_path: Path) -> None:
    file = read_models_file(_file(tmp_path, TWO))
    assert file.budget_bytes == 2 << 30
    a, b = file.models
    assert a.flags == ("--max-num-seqs", "4", "--lora-root", "/x y")
    assert b.flags == ("--max-num-seqs", "8")
    assert (a.pinned, b.pinned, b.folder) == (True, False, "org%2Fb")
    as_json = json.dumps({"memory_gib": 1, "models": [{"name": "a", "path": "/m"}]})
    assert read_models_file(_file(tmp_path, as_json, "m.json")).models[0].name == "a"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("memory_gib: 2\nmodels: []", "models: "),
        ("models: [{name: a, path: b}]", "memory_gib: Field required"),
        ("memory_gib: 0\nmodels: [{name: a, path: b}]", "memory_gib: "),
        ("memory_gib: 2\nmodels: [{name: ../a, path: b}]", "models.0.name: "),
        ("memory_gib: 2\nmodels: [{name: a, path: b, pined: true}]", "models.0.pined: "),
        (TWO.replace("org/b", "a"), "the name 'a' is used twice"),
        ("{", "cannot be read"),
    ],
)
def test_a_wrong_file_is_refused_by_field(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        read_models_file(_file(tmp_path, text))


@pytest.mark.parametrize(
    ("command", "flags", "message"),
    [
        (["serve", "m"], "", "MODEL ('m') cannot be used with --models"),
        (["check", "m"], "", "--models works with serve alone"),
        (["serve", "--lora-root", "/x"], "", "--lora-root cannot be shared by several models"),
        (["serve", "--served-model-name", "x"], "", "--served-model-name cannot be used"),
        (["serve"], "--port 1", "the flags of the model 'a' contain --port"),
        (["serve"], "--api-key k", "the flags of the model 'a' contain --api-key"),
        (["serve"], "--data-dir /x", "the flags of the model 'a' contain --data-dir"),
        (["serve"], "--served-model-name b", "contain --served-model-name"),
        (["serve"], "--max-num-seqz 4", "--max-num-seqz: unknown flag"),
    ],
)
def test_what_cannot_work_is_refused_by_name(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    flags: str,
    message: str,
) -> None:
    text = f"memory_gib: 1\nmodels: [{{name: a, path: /m, flags: '{flags}'}}]"
    with pytest.raises(SystemExit) as end:
        main([*command, "--models", str(_file(tmp_path, text))])
    assert end.value.code == 2
    assert message in capsys.readouterr().err
