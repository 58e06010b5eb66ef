"""The head of a GGUF file, or of one of its parts: its keys, and where its tensors lie.

Everything is read within bounds: a count or a length from a damaged file decides neither how much
is allocated nor how long reading takes, and each error names the key or the tensor. Layout: the
GGUF specification, versions 2 and 3. A part but the first has no key of the model.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from transformers.integrations.gguf.dequant import GGML_BLOCK
from transformers.integrations.gguf.reader import GgufHeader, TensorInfo

from rbln_backend.errors import CheckpointError

MAX_KEYS = 1 << 16
MAX_TENSORS = 1 << 18
MAX_NAME_BYTES = 1 << 10
MAX_TEXT_BYTES = 1 << 24
"""Of one value: chat templates are the longest."""
MAX_ITEMS = 1 << 22
"""Of a list: vocabularies and merges are the longest."""
_MAX_DIMENSIONS = 4
_MAX_ALIGNMENT = 1 << 20

_VERSIONS = (2, 3)
_NUMBERS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _TEXT, _LIST = 7, 8, 9
_PLAIN = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class Head:
    """Header of a file; all its tensors lie within the file."""

    keys: dict[str, Any]
    tensors: tuple[TensorInfo, ...]
    data_start: int

    def as_header(self, path: Path, architecture: str) -> GgufHeader:
        """The same for transformers' functions that read tensors."""
        return GgufHeader(str(path), architecture, self.tensors, self.data_start)


def read_head(path: Path) -> Head:
    """Read the head; raises `CheckpointError` for a damaged file, `OSError` for an absent one."""
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            raise CheckpointError("the file is empty")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Cursor(data, path.name).head()


class _Cursor:
    """Reads one value after the other; `_subject` is what an error is about."""

    def __init__(self, data: mmap.mmap, name: str) -> None:
        self._data = data
        self._file_name = name
        self._place = 0
        self._subject = "the header"

    def head(self) -> Head:
        if self._data[:4] != b"GGUF":
            self._fail("does not begin with GGUF")
        self._place = 4
        version = self._number("I")
        if version not in _VERSIONS:
            self._fail(f"version {version}; 2 and 3 are read")
        num_tensors = self._count("Q", MAX_TENSORS, "tensors")
        num_keys = self._count("Q", MAX_KEYS, "keys")
        keys = self._keys(num_keys)
        alignment = _alignment(keys)
        tensors = self._tensors(num_tensors, alignment)
        start = -(-self._place // alignment) * alignment
        missing = max((start + x.offset + x.nbytes for x in tensors), default=0) - len(self._data)
        if missing > 0:
            raise CheckpointError(
                f"the last {missing:,} bytes of {self._file_name} are missing; fetch it again"
            )
        return Head(keys, tensors, start)

    def _fail(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self._subject}: {reason}")

    def _take(self, size: int) -> int:
        """Go past `size` bytes and return where they begin."""
        left = len(self._data) - self._place
        if size > left:
            self._fail(f"{size:,} bytes, and the file ends after {left:,}; it is cut or damaged")
        self._place += size
        return self._place - size

    def _number(self, form: str) -> Any:
        return struct.unpack_from(f"<{form}", self._data, self._take(struct.calcsize(form)))[0]

    def _count(self, form: str, most: int, what: str) -> int:
        count = int(self._number(form))
        if count > most:
            self._fail(f"{count:,} {what}; at most {most:,} are read")
        return count

    def _text(self, most: int) -> str:
        length = self._count("Q", most, "bytes of text")
        start = self._take(length)
        try:
            return self._data[start : start + length].decode("utf-8")
        except UnicodeDecodeError as error:
            self._fail(f"not UTF-8: {error.reason} at byte {error.start}")

    def _name(self) -> str:
        name = self._text(MAX_NAME_BYTES)
        if not name or not name.isprintable():
            self._fail(f"{name!r:.100}, which cannot be printed")
        return name

    def _keys(self, count: int) -> dict[str, Any]:
        keys: dict[str, Any] = {}
        for number in range(1, count + 1):
            self._subject = f"the name of key {number} of {count}"
            name = self._name()
            self._subject = name
            if name in keys:
                self._fail("stands twice in the file")
            keys[name] = self._value(self._number("I"))
        return keys

    def _value(self, kind: int) -> Any:
        if kind in _NUMBERS:
            return self._number(_NUMBERS[kind])
        if kind == _BOOL:
            return self._bool(self._number("B"))
        if kind == _TEXT:
            return self._text(MAX_TEXT_BYTES)
        if kind != _LIST:
            self._fail(f"a value of type {kind}, which is not read")
        return self._list(self._number("I"))

    def _bool(self, number: int) -> bool:
        if number > 1:
            self._fail(f"{number} is not a truth value, which is 0 or 1")
        return number == 1

    def _list(self, kind: int) -> list[Any]:
        count = self._count("Q", MAX_ITEMS, "items")
        if kind in _NUMBERS:
            form = f"<{count}{_NUMBERS[kind]}"
            return list(struct.unpack_from(form, self._data, self._take(struct.calcsize(form))))
        if kind == _BOOL:
            start = self._take(count)
            return [self._bool(number) for number in self._data[start : start + count]]
        if kind != _TEXT:
            self._fail(f"a list of type {kind}, which is not read")
        subject, items = self._subject, []
        for number in range(count):
            self._subject = f"{subject}[{number}]"
            items.append(self._text(MAX_TEXT_BYTES))
        return items

    def _tensors(self, count: int, alignment: int) -> tuple[TensorInfo, ...]:
        tensors: dict[str, TensorInfo] = {}
        for number in range(1, count + 1):
            self._subject = f"the name of tensor {number} of {count}"
            name = self._name()
            self._subject = f"tensor {name}"
            if name in tensors:
                self._fail("stands twice in the file")
            tensors[name] = self._tensor(name, alignment)
        return tuple(tensors.values())

    def _tensor(self, name: str, alignment: int) -> TensorInfo:
        dimensions = self._count("I", _MAX_DIMENSIONS, "dimensions")
        # The fastest first.
        shape = tuple(reversed([int(self._number("Q")) for _ in range(dimensions)]))
        kind, offset = self._number("I"), self._number("Q")
        if kind not in _PLAIN and kind not in GGML_BLOCK:
            self._fail(f"type {kind}, which is not read")
        elements, size = GGML_BLOCK[kind] if kind in GGML_BLOCK else (1, _PLAIN[kind].itemsize)
        if not shape or 0 in shape:
            self._fail(f"shape {shape}, which has no elements")
        if shape[-1] % elements:
            self._fail(f"rows of {shape[-1]}, which are not whole blocks of {elements}")
        if offset % alignment:
            self._fail(f"begins at byte {offset:,}, which is not a multiple of {alignment}")
        return TensorInfo(name, shape, kind, offset, math.prod(shape) // elements * size)


def _alignment(keys: dict[str, Any]) -> int:
    alignment = keys.get("general.alignment", _ALIGNMENT)
    is_power = type(alignment) is int and alignment > 0 and alignment & (alignment - 1) == 0
    if not is_power or alignment > _MAX_ALIGNMENT:
        raise CheckpointError(
            f"general.alignment: {alignment!r:.99}; must be a power of two up to {_MAX_ALIGNMENT:,}"
        )
    return int(alignment)
