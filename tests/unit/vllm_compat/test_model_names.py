"""The names of transformers' models come from a file while its sources are the same."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from rbln_backend.vllm_compat.model_names import ModelNames

NAMES = {"llama": {frozenset({"torch"}): {"modeling_llama": {"LlamaModel"}}, frozenset(): {}}}


class Import:
    """One process's import of a module whose function counts its calls."""

    def __init__(self, root: Path | None, *, writes: bool = True) -> None:
        self.reads = 0
        self.module = ModuleType("import_utils")
        self.module.create_import_structure_from_path = self._read  # type: ignore[attr-defined]
        ModelNames(root, writes=writes).install(self.module)

    def _read(self, path: str) -> Any:
        self.reads += 1
        return NAMES

    def names(self, path: Path) -> Any:
        return self.module.create_import_structure_from_path(path)


@pytest.fixture
def models(tmp_path: Path) -> Path:
    folder = tmp_path / "models"
    (folder / "llama").mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    (folder / "llama" / "modeling_llama.py").write_text("__all__ = []")
    return folder


def test_the_sources_are_read_once(tmp_path: Path, models: Path) -> None:
    first, second = Import(tmp_path / "root"), Import(tmp_path / "root")
    assert first.names(models) == first.names(models / "__init__.py") == NAMES
    assert first.names(models) is not first.names(models)
    assert second.names(models) == NAMES
    assert (first.reads, second.reads) == (1, 0)


def test_changed_sources_are_read_again(tmp_path: Path, models: Path) -> None:
    Import(tmp_path / "root").names(models)
    (models / "llama" / "modeling_llama.py").write_text("__all__ = ['Other']")
    later = Import(tmp_path / "root")
    later.names(models)
    assert later.reads == 1


@pytest.mark.parametrize(
    "content", ["", "{", "[]", '[{"..os": [{}, []]}, []]', '[{}, [[["torch"], {"a": ["b.c"]}]]]']
)
def test_a_damaged_file_is_written_again(tmp_path: Path, models: Path, content: str) -> None:
    Import(tmp_path / "root").names(models)
    [file] = (tmp_path / "root" / "imports").iterdir()
    file.write_text(content)
    later, last = Import(tmp_path / "root"), Import(tmp_path / "root")
    assert later.names(models) == last.names(models) == NAMES
    assert (later.reads, last.reads) == (1, 0)


def test_nothing_is_written_to_a_root_that_is_only_read(tmp_path: Path, models: Path) -> None:
    assert Import(tmp_path / "root", writes=False).names(models) == NAMES
    assert Import(None).names(models) == NAMES
    assert not (tmp_path / "root").exists()


def test_other_folders_are_left_to_transformers(tmp_path: Path, models: Path) -> None:
    here = Import(tmp_path / "root")
    here.names(models / "llama")
    assert here.reads == 1
    assert not (tmp_path / "root").exists()
