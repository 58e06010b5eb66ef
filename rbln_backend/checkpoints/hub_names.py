"""Names of models on a hub, and the files of a repository that a model needs; pure Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rbln_backend.errors import CheckpointError

_WORD = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"{_WORD}/{_WORD}")
_GGUF = ".gguf"
# Of formats and devices that are not served.
_SKIPPED_FOLDERS = {"onnx", "openvino", "coreml", "original", "metal", "gguf", "runs"}
_TEXT_SUFFIXES = {".json", ".txt", ".jinja", ".model", ".tiktoken", ".md", ".vocab"}
_TEXT_NAMES = {"LICENSE", "NOTICE"}
# Modules of sentence-transformers, such as 1_Pooling and 2_Dense.
_MODULE = re.compile(r"\d+_\w+")


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
    found = [p for p in paths if p.endswith(".safetensors") and _is_module_or_root(p)]
    if any("/" not in p for p in found):
        plain = [p for p in found if not p.startswith("consolidated")]
        return [paths[p] for p in (plain if any("/" not in p for p in plain) else found)]
    bins = [p for p in paths if re.fullmatch(r"pytorch_model(-\d+-of-\d+)?\.bin", p)]
    return [paths[p] for p in (*found, *bins)] if bins else []


def _is_module_or_root(path: str) -> bool:
    folder, slash, _ = path.rpartition("/")
    return not slash or _MODULE.fullmatch(folder) is not None


def _offer(files: Sequence[HubFile]) -> str:
    """Return the end of a message that lists the GGUF files of a repository."""
    found = sorted(file.path for file in files if file.path.endswith(_GGUF))
    if not found:
        return ""
    listed = ", ".join(found[:20])
    return f"; it has {listed}: download one and run `rbln-serve fetch FILE.gguf OUT`"
