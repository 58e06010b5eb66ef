"""Checkpoints that `rbln-serve fetch` writes or downloads, and where they lie.

Those of the catalogue are in `<cache root>/rbln/checkpoints/`, under their name and the digest of
their file. Invariant: a folder that is there is whole; it is written beside its place and renamed.
"""

from __future__ import annotations

import glob
from pathlib import Path

from rbln_backend.checkpoints.catalogue import CATALOGUE
from rbln_backend.checkpoints.download import download
from rbln_backend.checkpoints.hub_download import cached_repo, download_repo
from rbln_backend.checkpoints.hub_names import is_repo_name
from rbln_backend.errors import CheckpointError
from rbln_backend.host.file_locks import claimed_folder
from rbln_backend.settings import HubSettings, hub_settings

_BUILDING = "building-"


def checkpoint_of(name: str, cache_root: Path) -> Path:
    """Return the folder of a model of the catalogue.

    Raises `CheckpointError` unless it was fetched.
    """
    folder = _folder(name, cache_root)
    if not folder.is_dir():
        raise CheckpointError(f"{name} is not in {cache_root} yet: run `rbln-serve fetch {name}`")
    return folder


def fetch(
    name: str, cache_root: Path, revision: str | None = None, hub: HubSettings | None = None
) -> Path:
    """Return the folder of a model of the catalogue or of a hub; downloads it unless it is there.

    Raises `CheckpointError`.
    """
    if is_on_hub(name):
        return download_repo(name, revision, hub or hub_settings())
    folder = _folder(name, cache_root)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with claimed_folder(folder.parent, _BUILDING, f"{_BUILDING}*") as place:
            convert(download(CATALOGUE[name], place), folder)
    except (OSError, CheckpointError) as error:
        # Another process may have been first.
        if folder.is_dir():
            return folder
        raise CheckpointError(f"{name} cannot be fetched: {error}") from error
    return folder


def convert(file: Path, folder: Path) -> None:
    """Write the GGUF `file` as the checkpoint `folder`, whole or not at all.

    Raises `CheckpointError`, also if there is something at `folder`.
    """
    # It imports transformers.
    from rbln_backend.checkpoints.conversion import write_checkpoint

    if folder.exists():
        raise CheckpointError(f"{folder} exists; name a new folder, or remove it")
    prefix = f".{folder.name}-{_BUILDING}"
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        leftovers = f"{glob.escape(prefix)}*"
        with claimed_folder(folder.parent, prefix, leftovers, mode=0o777) as building:
            write_checkpoint(file, building)
            building.rename(folder)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error}") from error


def is_on_hub(model: str) -> bool:
    """Return True if MODEL is named as a repository of a hub."""
    return model not in CATALOGUE and is_repo_name(model)


def local_or_fetched(
    repo: str, revision: str | None, hub: HubSettings, *, may_fetch: bool
) -> Path | None:
    """Return the folder of a model of a hub, without a network if it was fetched.

    None where it was not and may not be fetched now. Raises `CheckpointError` for a model that
    cannot be downloaded.
    """
    try:
        return cached_repo(repo, revision, hub)
    except CheckpointError:
        if may_fetch and not hub.is_offline:
            return download_repo(repo, revision, hub)
        return None


def _folder(name: str, cache_root: Path) -> Path:
    return cache_root / "rbln" / "checkpoints" / f"{name}-{CATALOGUE[name].sha256[:12]}"
