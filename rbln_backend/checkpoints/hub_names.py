"""Names of models on a hub, and the files of a repository that a model needs; pure Python."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from rbln_backend.checkpoints.parts import parts_of
from rbln_backend.errors import CheckpointError

_WORD = r"[A-Za-z0-9][\w.-]*"
_NAME = re.compile(rf"(?P<repo>{_WORD}/{_WORD})(?::(?P<quant>[\w.-]+))?")
_GGUF = ".gguf"
# Of formats and devices that are not served.
_SKIPPED_FOLDERS = {"onnx", "openvino", "coreml", "original", "metal", "gguf", "runs"}
_TEXT_SUFFIXES = {".json", ".txt", ".jinja", ".model", ".tiktoken", ".md", ".vocab"}
_TEXT_NAMES = {"LICENSE", "NOTICE"}
# Modules of sentence-transformers, such as 1_Pooling and 2_Dense.
_MODULE = re.compile(r"\d+_\w+")
_PROJECTOR = "mmproj"


@dataclass(frozen=True, slots=True)
class HubName:
    """Repository, and the quantization of the GGUF file in it; None: a checkpoint."""

    repo: str
    quant: str | None = None

    def __str__(self) -> str:
        return self.repo if self.quant is None else f"{self.repo}:{self.quant}"


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a repository; files outside of its large-file storage have no `sha256`."""

    path: str
    size: int
    sha256: str | None = None


def hub_name(text: str) -> HubName | None:
    """Parse `ORG/REPO` or `ORG/REPO:QUANT`; None for other texts and for paths that exist."""
    match = _NAME.fullmatch(text)
    if match is None or text.endswith(_GGUF) or Path(text).exists():
        return None
    return HubName(match["repo"], match["quant"])


def needed_files(name: HubName, files: Sequence[HubFile]) -> list[HubFile]:
    """Return the files to download. Raises `CheckpointError` if the repository lacks them."""
    if name.quant is not None:
        return _quantized(name, files)
    texts = [file for file in files if _is_text(PurePosixPath(file.path))]
    weights = _weights(files)
    if not weights:
        raise CheckpointError(f"{name} has no weights that can be served{_offer(name, files)}")
    if not any(file.path == "config.json" for file in texts):
        raise CheckpointError(f"{name} has no config.json{_offer(name, files)}")
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


def _quantized(name: HubName, files: Sequence[HubFile]) -> list[HubFile]:
    """Return the parts of the GGUF file whose name has the quantization as a word."""
    quant = re.escape(name.quant or "")
    paths = {file.path: file for file in files if _is_gguf(file.path)}
    exact = re.compile(rf"(.*[-._/])?{quant}([-./].*)?{re.escape(_GGUF)}", re.IGNORECASE)
    found = {parts_of(Path(p))[0].as_posix() for p in paths if exact.fullmatch(p)}
    # UD-Q4_K_XL has Q4_K_XL as a word, too; the name without another word before it is meant.
    if len(found) > 1:
        found = {min(found, key=len)} if _differ_in_prefix(found, name.quant or "") else found
    if not found:
        raise CheckpointError(f"{name.repo} has no GGUF file of {name.quant}{_offer(name, files)}")
    if len(found) > 1:
        raise CheckpointError(f"{name} could be any of {', '.join(sorted(found))}")
    parts = [part.as_posix() for part in parts_of(Path(found.pop()))]
    missing = [part for part in parts if part not in paths]
    if missing:
        raise CheckpointError(f"{name.repo} lacks {', '.join(missing)}")
    return [paths[part] for part in parts]


def _differ_in_prefix(found: set[str], quant: str) -> bool:
    """Return True if all names are the shortest one with more words before the quantization."""
    shortest = min(found, key=len)
    start, _, end = shortest.lower().rpartition(quant.lower())
    end = quant.lower() + end
    return all(path.lower().startswith(start) and path.lower().endswith(end) for path in found)


def _is_gguf(path: str) -> bool:
    return path.endswith(_GGUF) and _PROJECTOR not in path.lower()


def _offer(name: HubName, files: Sequence[HubFile]) -> str:
    """Return the end of a message that lists the GGUF files of a repository."""
    found = sorted({parts_of(Path(f.path))[0].as_posix() for f in files if _is_gguf(f.path)})
    if not found:
        return ""
    listed = ", ".join(found[:20])
    return f"; it has {listed}: name one as {name.repo}:QUANT, such as {name.repo}:Q4_K_M"
