"""Where checkpoints that were made here lie: `<cache root>/rbln/checkpoints/<name>/`.

Invariant: a folder that is there is whole; it is written beside its place and renamed. One folder
per source, so that a file that was changed replaces its former conversion.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from rbln_backend.checkpoints.catalogue import CATALOGUE
from rbln_backend.checkpoints.conversion import convert
from rbln_backend.checkpoints.download import download
from rbln_backend.checkpoints.parts import parts_of
from rbln_backend.errors import CheckpointError
from rbln_backend.host.file_locks import claimed_folder

logger = logging.getLogger(__name__)

SUFFIX = ".gguf"
# Raise it when conversion gives other files than before.
_FORM = 2
_RECORD = "made_of.json"
_BUILDING = "building-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Source of a folder, beside `_FORM`; `identity` changes with the file's content."""

    name: str
    identity: str
    form: int = _FORM


def is_made_here(model: str) -> bool:
    """Return True if MODEL is a GGUF file or a name of the catalogue."""
    return model in CATALOGUE or (model.endswith(SUFFIX) and Path(model).expanduser().is_file())


def checkpoint_of(model: str, cache_root: Path) -> Path:
    """Return the folder of MODEL, of which `is_made_here` is true.

    A file is converted unless that was done; of the catalogue, what was fetched is taken. Raises
    `CheckpointError`.
    """
    if model in CATALOGUE:
        return _fetched(model, cache_root)
    file = Path(model).expanduser().resolve()
    stats = [part.stat() for part in parts_of(file) if part.exists()]
    identity = " ".join(f"{stat.st_size}-{stat.st_mtime_ns}" for stat in stats)
    source = Source(name=str(file), identity=identity)
    name = f"{file.stem}-{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}"
    return _made(_root(cache_root) / name, source, lambda folder: convert(file, folder))


def fetch(name: str, cache_root: Path) -> Path:
    """Return the folder of a model of the catalogue; downloads it unless it is there.

    Raises `CheckpointError`.
    """
    if name not in CATALOGUE:
        raise CheckpointError(f"{name!r} cannot be fetched; {', '.join(CATALOGUE)} can")
    wanted = CATALOGUE[name]

    def make(folder: Path) -> str:
        with claimed_folder(folder.parent, _BUILDING, f"{_BUILDING}*") as place:
            return convert(download(wanted, place), folder)

    return _made(_root(cache_root) / name, _source(name), make)


def _fetched(name: str, cache_root: Path) -> Path:
    folder = _root(cache_root) / name
    if not _holds(folder, _source(name)):
        raise CheckpointError(f"{name} is not in {cache_root} yet: run `rbln-serve fetch {name}`")
    return folder


def _source(name: str) -> Source:
    return Source(name=name, identity=CATALOGUE[name].sha256)


def _root(cache_root: Path) -> Path:
    return cache_root / "rbln" / "checkpoints"


def _made(folder: Path, source: Source, make: Callable[[Path], str]) -> Path:
    """Return `folder`, made if it is not there or was made of something else."""
    if _holds(folder, source):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with claimed_folder(folder.parent, _BUILDING, f"{_BUILDING}*", mode=0o777) as building:
            done = make(building)
            record = json.dumps(asdict(source), indent=1) + "\n"
            (building / _RECORD).write_text(record, encoding="utf-8")
            _replace(building, folder, source)
    except OSError as error:
        raise CheckpointError(f"{source.name} cannot be made a checkpoint: {error}") from error
    logger.info("Made %s of %s: %s", folder, source.name, done)
    return folder


def _replace(building: Path, folder: Path, source: Source) -> None:
    """Put the new folder in place; another process may have been first with the same."""
    with suppress(OSError):
        building.rename(folder)
        return
    if not _holds(folder, source):
        shutil.rmtree(folder)
        building.rename(folder)


def _holds(folder: Path, source: Source) -> bool:
    try:
        content = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return bool(content == asdict(source))
