"""Whether a folder's safetensors are all there and whole, from their headers; no weight is read.

A download that was cut off otherwise shows after minutes, as an error of a library.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from server.frontend import LaunchError

_INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = ("dummy", "pt", "npcache")
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100 << 20
# As the files spell them, and as users do.
_DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass
class WeightFiles:
    """What was found: `dtype` is that of most weights, None where they are packed or absent."""

    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    dtype: str | None = None


def refuse_damaged_weights(model: str, load_format: str) -> None:
    """Raise `LaunchError` if MODEL is a folder of safetensors that are not whole."""
    if load_format not in _OTHER_FORMATS and (problems := check_weight_files(model, "").problems):
        raise LaunchError("; ".join(problems))


def check_weight_files(model: str, dtype: str) -> WeightFiles:
    """Look at MODEL, if it is a folder; `dtype` is what the engine will compute in."""
    found, folder = WeightFiles(), Path(model).expanduser()
    if not folder.is_dir():
        return found
    names = _names(folder, found)
    if not names and not found.problems:
        if not any(path for kind in ("*.bin", "*.pt", "*.gguf") for path in folder.glob(kind)):
            found.warnings.append(
                f"MODEL {model!r} has no weights: it can be compiled for, but not served"
            )
        return found
    counts: Counter[str] = Counter()
    for name in names:
        _check_file(folder / name, counts, found)
    if counts:
        found.dtype = _DTYPES.get(counts.most_common(1)[0][0])
    if found.dtype is not None and found.dtype != dtype:
        found.warnings.append(
            f"the weights are stored as {found.dtype} and converted to {dtype} as they are read; "
            f"--dtype {found.dtype} takes them as they are"
        )
    return found


def _names(folder: Path, found: WeightFiles) -> list[str]:
    """The files that the index names, else all of the folder."""
    index = folder / _INDEX
    if not index.is_file():
        return sorted(path.name for path in folder.glob("*.safetensors"))
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        names = sorted({str(name) for name in content["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        found.problems.append(f"{_INDEX} cannot be read: {error}; fetch it again")
        return []
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        told = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        found.problems.append(
            f"{_INDEX} names {len(names)} files, of which {len(missing)} are missing: {told}; "
            "fetch them"
        )
    return [name for name in names if name not in missing]


def _check_file(path: Path, counts: Counter[str], found: WeightFiles) -> None:
    try:
        size, header_bytes, header = _read_header(path)
    except (OSError, ValueError, RecursionError) as error:
        found.problems.append(f"{path.name} is damaged: {error}; fetch it again")
        return
    tensors = [entry for name, entry in header.items() if name != "__metadata__"]
    try:
        end = max((int(entry["data_offsets"][1]) for entry in tensors), default=0)
        counts.update(str(entry["dtype"]) for entry in tensors)
    except (KeyError, TypeError, IndexError, ValueError):
        found.problems.append(f"{path.name} is damaged: its header is malformed; fetch it again")
        return
    wanted = _LENGTH_BYTES + header_bytes + end
    if size != wanted:
        found.problems.append(
            f"{path.name} has {size:,} bytes, its header says {wanted:,}; fetch it again"
        )
        return
    try:
        # What reads the weights later: it knows the sizes of types and where tensors may lie.
        with safe_open(path, framework="np"):
            pass
    except (OSError, SafetensorError) as error:
        found.problems.append(f"{path.name} is damaged: {error}; fetch it again")


def _read_header(path: Path) -> tuple[int, int, dict[str, Any]]:
    """Return the file's size, the header's, and the header; `ValueError` if it is none."""
    with path.open("rb") as file:
        size = path.stat().st_size
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > _MOST_HEADER_BYTES:
            raise ValueError("it does not begin as safetensors do")
        if length > size - _LENGTH_BYTES:
            raise ValueError(f"its {size:,} bytes are too few for its header of {length:,}")
        header = json.loads(file.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    return size, length, header
