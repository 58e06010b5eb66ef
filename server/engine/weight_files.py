"""Checks a checkpoint's folder before the engine's libraries are imported, and reads it ahead.

Hugging Face's error for a folder that is no checkpoint names neither the file nor the problem, and
a truncated download causes a library's error after minutes. Of safetensors files, headers are read.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from rbln_backend.host.resources import host_memory
from server.errors import json_type
from server.frontend import LaunchError
from server.wire import JsonObject

_CONFIG = "config.json"
# Mistral's format.
_OTHER_CONFIGS = ("params.json",)


def check_model_folder(model: str) -> None:
    """Raise `LaunchError` when `model` is a folder without a readable configuration.

    Names of models on the Hugging Face hub pass: they are not downloaded yet.
    """
    folder = Path(model).expanduser()
    if not folder.is_dir():
        return
    path = folder / _CONFIG
    if not path.is_file():
        if any((folder / name).is_file() for name in _OTHER_CONFIGS):
            return
        raise LaunchError(f"MODEL {model!r}: the folder has no {_CONFIG}, so it is no checkpoint")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LaunchError(f"MODEL {model!r}: {_CONFIG} cannot be read: {error}") from None
    if not isinstance(content, dict):
        kind = json_type(content)
        raise LaunchError(f"MODEL {model!r}: {_CONFIG} must hold a JSON object, not {kind}")


def get_model_config(model: str) -> JsonObject:
    """Return the folder's config.json; empty for a model on the hub."""
    path = Path(model).expanduser() / _CONFIG
    if not path.is_file():
        return {}
    content: JsonObject = json.loads(path.read_text(encoding="utf-8"))
    return content


_INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = ("dummy", "pt", "npcache")
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100 << 20
# Names in safetensors files, and of --dtype.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_MOST_OF_MEMORY = 0.5
"""Share of the free memory up to which files are read ahead; more could displace one another."""


@dataclass
class WeightFiles:
    """Result of a check; `dtype` is that of most weights, None if they are packed or absent."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    dtype: str | None = None


def read_ahead(argv: Sequence[str]) -> list[Path]:
    """Ask the kernel to read the safetensors files of the folder that `argv` begins with.

    Returns these files: none for a model of the hub, dummy weights or too large a checkpoint. Files
    that are in the page cache cost nothing. May take as long as the disk's queue is full.
    """
    if not argv or argv[0].startswith("-") or "dummy" in argv:
        return []
    files = sorted(Path(argv[0]).expanduser().glob("*.safetensors"))
    try:
        size = sum(path.stat().st_size for path in files)
        if size > _MOST_OF_MEMORY * host_memory().available_bytes:
            return []
        for path in files:
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)
    except OSError:
        # The check of the weights reports files that cannot be read.
        return []
    return files


def refuse_damaged_weights(model: str, load_format: str) -> None:
    """Raise `LaunchError` if MODEL is a folder with damaged safetensors files."""
    if load_format not in _OTHER_FORMATS and (problems := check_weight_files(model, "").problems):
        raise LaunchError("; ".join(problems))


def check_weight_files(model: str, dtype: str) -> WeightFiles:
    """Check MODEL if it is a folder; `dtype` is the engine's."""
    result, folder = WeightFiles(), Path(model).expanduser()
    if not folder.is_dir():
        return result
    names = _names(folder, result)
    if not names and not result.problems:
        if not any(path for kind in ("*.bin", "*.pt") for path in folder.glob(kind)):
            result.warnings.append(
                f"MODEL {model!r} has no weights: it can be compiled for, but not served"
            )
        return result
    counts: Counter[str] = Counter()
    owners: dict[str, str] = {}
    for name in names:
        for tensor in _check_file(folder / name, counts, result):
            other = owners.setdefault(tensor, name)
            if other != name:
                result.problems.append(
                    f"{tensor} is in {other} and in {name}, of which one is not this checkpoint's; "
                    "remove that file"
                )
                return result
    if counts:
        result.dtype = _DTYPES.get(counts.most_common(1)[0][0])
    if result.dtype is not None and result.dtype != dtype:
        result.warnings.append(
            f"the weights are stored as {result.dtype} and converted to {dtype} while loading; "
            f"--dtype {result.dtype} avoids the conversion"
        )
    return result


def _names(folder: Path, result: WeightFiles) -> list[str]:
    """Return the files in the index, else all safetensors files of the folder."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted(path.name for path in folder.glob("*.safetensors"))
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = sorted({str(name) for name in content["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        result.problems.append(f"{_INDEX} cannot be read: {error}; fetch it again")
        return []
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        listed = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        result.problems.append(
            f"{_INDEX} names {len(names)} files, of which {len(missing)} are missing: {listed}; "
            "fetch them"
        )
    return [name for name in names if name not in missing]


def _check_file(path: Path, counts: Counter[str], result: WeightFiles) -> list[str]:
    """Add the problems of a file; return the names of its tensors."""
    try:
        size, header_bytes, header = _read_header(path)
    except (OSError, ValueError, RecursionError) as error:
        result.problems.append(f"{path.name} is damaged: {error}; fetch it again")
        return []
    names = [name for name in header if name != "__metadata__"]
    tensors = [header[name] for name in names]
    try:
        end = max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
        counts.update(str(entry["dtype"]) for entry in tensors)
    except (KeyError, TypeError, IndexError, ValueError):
        result.problems.append(f"{path.name} is damaged: its header is malformed; fetch it again")
        return []
    wanted = _LENGTH_BYTES + header_bytes + end
    if size != wanted:
        result.problems.append(
            f"{path.name} has {size:,} bytes, its header says {wanted:,}; fetch it again"
        )
        return []
    if hole := _get_hole(path, size):
        result.problems.append(
            f"{path.name} has no data from byte {hole:,} on, as a download leaves it that was cut "
            "off in space reserved before; fetch it again"
        )
        return []
    try:
        # The library that loads the weights also checks dtypes and offsets.
        with safe_open(path, framework="np"):
            pass
    except (OSError, SafetensorError) as error:
        result.problems.append(f"{path.name} is damaged: {error}; fetch it again")
    return names


def _get_hole(path: Path, size: int) -> int | None:
    """Return where a file's first hole begins; None where it has none, or the disk cannot say."""
    with path.open("rb") as file:
        try:
            begin = os.lseek(file.fileno(), 0, os.SEEK_HOLE)
        except OSError:
            return None
    return begin if begin < size else None


def _read_header(path: Path) -> tuple[int, int, dict[str, Any]]:
    """Return the file's size, the header's size, and the header; `ValueError` if invalid."""
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > _MOST_HEADER_BYTES:
            raise ValueError("it does not begin with a safetensors header")
        if length > size - _LENGTH_BYTES:
            raise ValueError(f"its {size:,} bytes are too few for its header of {length:,}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return size, length, header
