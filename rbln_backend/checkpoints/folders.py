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
from rbln_backend.checkpoints.hub_download import cached_repo, download_repo
from rbln_backend.checkpoints.hub_names import HubName, hub_name
from rbln_backend.checkpoints.parts import parts_of
from rbln_backend.errors import CheckpointError
from rbln_backend.host.file_locks import claimed_folder
from rbln_backend.settings import HubSettings, hub_settings

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
    """Return True if MODEL is a GGUF file, one on a hub, or a name of the catalogue."""
    if model in CATALOGUE or (model.endswith(SUFFIX) and Path(model).expanduser().is_file()):
        return True
    name = hub_name(model)
    return name is not None and name.quant is not None


def checkpoint_of(model: str, cache_root: Path) -> Path:
    """Return the folder of a GGUF file or a model of the catalogue.

    A file is converted unless that was done; of the catalogue, what was fetched is taken. Raises
    `CheckpointError`.
    """
    if model in CATALOGUE:
        return _fetched(model, cache_root)
    file = Path(model).expanduser().resolve()
    stats = [part.stat() for part in parts_of(file) if part.exists()]
    identity = " ".join(f"{stat.st_size}-{stat.st_mtime_ns}" for stat in stats)
    source = Source(name=str(file), identity=identity)
    folder = f"{file.stem}-{hashlib.sha256(os.fsencode(file)).hexdigest()[:12]}"
    return _made(_root(cache_root) / folder, source, lambda to: convert(file, to))


def fetch(
    name: str, cache_root: Path, revision: str | None = None, hub: HubSettings | None = None
) -> Path:
    """Return the folder of a model of the catalogue or of a hub; downloads it unless it is there.

    Raises `CheckpointError`.
    """
    if name not in CATALOGUE:
        found = hub_name(name)
        if found is None:
            names = ", ".join((*CATALOGUE, "ORG/REPO", "ORG/REPO:QUANT"))
            raise CheckpointError(f"{name!r} cannot be fetched; {names} can")
        return _fetch_from_hub(found, cache_root, revision, hub or hub_settings())
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


def is_on_hub(model: str) -> bool:
    """Return True if MODEL is named as a repository of a hub, with or without a quantization."""
    return model not in CATALOGUE and hub_name(model) is not None


def local_or_fetched(
    model: str, cache_root: Path, revision: str | None, hub: HubSettings, *, may_fetch: bool
) -> Path | None:
    """Return the folder of a model of a hub, without a network if it was fetched.

    None for a checkpoint that was not, where it may not be fetched now. Raises `CheckpointError`
    for a GGUF file that was not, and for a model that cannot be downloaded.
    """
    name = hub_name(model)
    assert name is not None
    try:
        if name.quant is not None:
            return _converted_from_hub(name, cache_root, revision)
        return cached_repo(name, revision, hub)[0]
    except CheckpointError:
        if may_fetch and not hub.is_offline:
            return _fetch_from_hub(name, cache_root, revision, hub)
        if name.quant is not None:
            raise
        return None


def _fetch_from_hub(
    name: HubName, cache_root: Path, revision: str | None, hub: HubSettings
) -> Path:
    """Return a snapshot's folder, or the checkpoint made of its GGUF file."""
    snapshot, files = download_repo(name, revision, hub)
    if name.quant is None:
        return snapshot
    # The snapshot's name is its commit.
    source = Source(name=_hub_key(name, revision), identity=f"{snapshot.name} {files[0].name}")
    return _made(_hub_folder(name, cache_root, revision), source, lambda to: convert(files[0], to))


def _converted_from_hub(name: HubName, cache_root: Path, revision: str | None) -> Path:
    folder = _hub_folder(name, cache_root, revision)
    record = _record_of(folder)
    if record.get("name") != _hub_key(name, revision) or record.get("form") != _FORM:
        raise CheckpointError(f"{name} is not in {cache_root} yet: run `rbln-serve fetch {name}`")
    return folder


def _hub_key(name: HubName, revision: str | None) -> str:
    return f"{name}@{revision or 'main'}"


def _hub_folder(name: HubName, cache_root: Path, revision: str | None) -> Path:
    key = _hub_key(name, revision)
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    return _root(cache_root) / f"{name.repo.rpartition('/')[2]}-{name.quant}-{digest}"


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
    return _record_of(folder) == asdict(source)


def _record_of(folder: Path) -> dict[str, object]:
    """Return the record of what a folder was made of; empty if there is none."""
    try:
        content = json.loads((folder / _RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}
