"""The head of one part of a GGUF file but the first, as llama-gguf-split writes it.

Such a part says which one it is and what tensors it has, and nothing of the model; transformers'
reader takes it for no GGUF file. Layout: the GGUF specification, versions 2 and 3.
"""

from __future__ import annotations

import math
import struct
from pathlib import Path
from typing import Any, BinaryIO

import torch
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.integrations.gguf.reader import GgufHeader, TensorInfo

_NUMBERS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_TEXT = 8
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_ALIGNMENT = 32


def read_part(path: Path, architecture: str) -> tuple[dict[str, Any], GgufHeader]:
    """What the part says of itself, and where its tensors lie.

    Raises `ValueError` or `struct.error` for anything else, `OSError` for a file that is not there.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF" or _number(file, "I") not in (2, 3):
            raise ValueError(f"{path.name} is no part of a GGUF file")
        num_tensors, num_keys = _number(file, "Q"), _number(file, "Q")
        keys = {_text(file): _value(file, path) for _ in range(num_keys)}
        tensors = tuple(_tensor(file, path) for _ in range(num_tensors))
        alignment = keys.get("general.alignment", _ALIGNMENT)
        start = -(-file.tell() // alignment) * alignment
    return keys, GgufHeader(str(path), architecture, tensors, start)


def _number(file: BinaryIO, form: str) -> Any:
    (value,) = struct.unpack(f"<{form}", file.read(struct.calcsize(f"<{form}")))
    return value


def _text(file: BinaryIO) -> str:
    return file.read(_number(file, "Q")).decode("utf-8")


def _value(file: BinaryIO, path: Path) -> Any:
    kind = _number(file, "I")
    if kind in _NUMBERS:
        return _number(file, _NUMBERS[kind])
    if kind != _TEXT:
        raise ValueError(f"{path.name} has a key of type {kind}, which parts do not have")
    return _text(file)


def _tensor(file: BinaryIO, path: Path) -> TensorInfo:
    name, num_sizes = _text(file), _number(file, "I")
    # The fastest first.
    shape = tuple(reversed([_number(file, "Q") for _ in range(num_sizes)]))
    kind, offset = _number(file, "I"), _number(file, "Q")
    if kind not in _PLAIN and kind not in GGML_BLOCK:
        raise ValueError(f"{path.name} has tensors of type {kind}, which is not read")
    elements, num_bytes = GGML_BLOCK[kind] if kind in GGML_BLOCK else (1, _PLAIN[kind].itemsize)
    return TensorInfo(name, shape, kind, offset, math.prod(shape) // elements * num_bytes)
