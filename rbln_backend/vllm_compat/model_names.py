"""The names that transformers' model modules export, kept from an earlier start.

transformers reads the source of every model, 2,700 files, twice in each process that imports it, to
list them: 0.5 s. The list is stored below the cache root with the names, sizes and times of those
files, and is used while they are the same. See the ledger, ``patches``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from rbln_backend.host.replaced_files import replace_file

MODULE = "transformers.utils.import_utils"
"""The module whose function is replaced."""

_FUNCTION = "create_import_structure_from_path"
_MODELS = "models"


class ModelNames:
    """transformers' function that lists exported names, over a file; ``root`` None: no file."""

    def __init__(self, root: Path | None, *, writes: bool) -> None:
        self._root, self._writes = root, writes

    def install(self, module: ModuleType) -> None:
        """Replace the function in transformers' module, which has just been imported."""
        read: Callable[[str], Any] = getattr(module, _FUNCTION)
        known: dict[Path, Any] = {}

        def names(module_path: str | Path) -> Any:
            path = Path(module_path)
            folder = path.parent if path.is_file() else path
            if folder.name != _MODELS:
                return read(str(module_path))
            if folder not in known:
                known[folder] = self._load(folder, read)
            # Each caller may change its own.
            return _decoded(known[folder])

        setattr(module, _FUNCTION, names)

    def _load(self, folder: Path, read: Callable[[str], Any]) -> Any:
        if self._root is None:
            return _encoded(read(str(folder)))
        file = self._root / "imports" / f"{_digest(folder)}.json"
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
            _check(found)
        except (OSError, ValueError):
            found = _encoded(read(str(folder)))
            if self._writes:
                _store(file, found)
        return found


def _digest(folder: Path) -> str:
    """Return a hash of the names, sizes and times of the Python files below ``folder``."""
    lines = sorted(_files(str(folder)))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


def _files(folder: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name == "__pycache__":
                continue
            if entry.is_dir():
                yield from _files(entry.path)
            elif entry.name.endswith(".py"):
                status = entry.stat()
                yield f"{entry.path} {status.st_size} {status.st_mtime_ns}"


def _encoded(structure: Any) -> Any:
    """Return folders, and sets of backends with the names by module that need them, for JSON."""
    folders = {k: _encoded(v) for k, v in structure.items() if isinstance(k, str)}
    exports = [
        [sorted(k), {module: sorted(names) for module, names in v.items()}]
        for k, v in structure.items()
        if not isinstance(k, str)
    ]
    return [folders, exports]


def _decoded(stored: Any) -> dict[Any, Any]:
    folders, exports = stored
    found: dict[Any, Any] = {name: _decoded(below) for name, below in folders.items()}
    for backends, modules in exports:
        found[frozenset(backends)] = {name: set(names) for name, names in modules.items()}
    return found


def _check(stored: Any) -> None:
    """Raise ``ValueError`` unless every name is one that transformers could have listed."""
    if not (isinstance(stored, list) and [type(part) for part in stored] == [dict, list]):
        raise ValueError("not a list of exported names")
    folders, exports = stored
    for name, below in folders.items():
        _check_names([name])
        _check(below)
    for export in exports:
        if not (isinstance(export, list) and [type(part) for part in export] == [list, dict]):
            raise ValueError("not exports of modules")
        if not all(isinstance(backend, str) for backend in export[0]):
            raise ValueError("not names of backends")
        for module, names in export[1].items():
            _check_names([module, *names])


def _check_names(names: list[Any]) -> None:
    for name in names:
        if not (isinstance(name, str) and name.isidentifier()):
            raise ValueError(f"{name!r} is no name of Python")


def _store(file: Path, content: Any) -> None:
    try:
        replace_file(file, json.dumps(content).encode())
    except OSError:
        # A later start reads the sources again.
        return
