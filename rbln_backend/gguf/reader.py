"""One GGUF file, in parts or whole: its metadata, and its tensors one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.integrations.gguf.dequant import GGML_BLOCK, GGML_NAME, dequantize
from transformers.integrations.gguf.reader import (
    GgufHeader,
    LazyGgufTensor,
    load_gguf_state_dict,
)

from rbln_backend.checkpoints.parts import parts_of
from rbln_backend.errors import CheckpointError
from rbln_backend.gguf.blocks import TYPES, BlockType, Parts
from rbln_backend.gguf.five_bits import Q5_0, Q5_1, announce, expand_five_bits
from rbln_backend.gguf.head import Head, read_head

# Elements that are expanded at a time, which bounds the float32 beside the result.
_PIECE = 1 << 24
MAX_PARTS = 10_000


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An open file; `metadata` has its keys, `header` all tensors.

    Invariant: every tensor lies within the file and is of a type that can be expanded.
    """

    path: Path
    metadata: Mapping[str, Any]
    header: GgufHeader
    tensors: Mapping[str, LazyGgufTensor]

    @classmethod
    def open(cls, path: Path) -> GgufFile:
        """Read all but the tensors; of a file in parts, `path` is the first.

        Raises `CheckpointError` for a damaged or partial file.
        """
        announce()
        try:
            head = read_head(path)
            header = head.as_header(path, _architecture(head))
            headers = [header, *_further_parts(path, header.architecture, head.keys)]
        except OSError as error:
            name = Path(error.filename or path).name
            raise CheckpointError(f"{name} cannot be read: {error.strerror}") from error
        everything = tuple(info for part in headers for info in part.tensors)
        tensors = {k: v for part in headers for k, v in load_gguf_state_dict(part).items()}
        if len(tensors) < len(everything):
            raise CheckpointError("two parts of the model have tensors of one name")
        return cls(path, head.keys, header._replace(tensors=everything), tensors)

    @property
    def architecture(self) -> str:
        """The model's family, by llama.cpp's name."""
        return self.header.architecture

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of written weights: the file's own, bfloat16 for blocks."""
        return self.header.dtype or torch.bfloat16

    def type_name(self, name: str) -> str | None:
        """The type of a tensor's blocks, e.g. Q4_K; None without any."""
        found = self.header.ggml_types[name]
        return GGML_NAME[found] if found in GGML_BLOCK else None

    def block_type(self, name: str) -> BlockType | None:
        """Return the form that keeps the tensor's blocks; None without supported blocks."""
        return TYPES.get(GGML_NAME.get(self.header.ggml_types[name], ""))

    def split(self, name: str) -> Parts:
        """A tensor [N, K] of blocks that can be kept: numbers int8, scales and perhaps minima."""
        shape, stored, kind = self.shape(name), self.tensors[name], self.block_type(name)
        assert kind is not None, name
        elements, num_bytes = GGML_BLOCK[stored.ggml_type]
        pieces = stored[...].reshape(-1, num_bytes).split(max(1, _PIECE // elements))
        numbers, scales, minima = zip(*map(kind.split, pieces), strict=True)
        joined = [torch.cat(part).reshape(shape[0], -1) for part in (numbers, scales)]
        least = None if minima[0] is None else torch.cat(minima).reshape(shape[0], -1)
        return joined[0], joined[1], least

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape in elements, outputs first."""
        return next(tuple(info.shape) for info in self.header.tensors if info.name == name)

    def read(self, name: str) -> torch.Tensor:
        """Return a tensor [N, K] in `dtype`, or [N] in float32."""
        shape, stored = self.shape(name), self.tensors[name]
        dtype = self.dtype if len(shape) > 1 else torch.float32
        if stored.ggml_type not in GGML_BLOCK:
            return stored[...].to(dtype)
        elements, num_bytes = GGML_BLOCK[stored.ggml_type]
        packed = stored[...].reshape(-1, num_bytes)
        pieces = packed.split(max(1, _PIECE // elements))
        expand = expand_five_bits if stored.ggml_type in (Q5_0, Q5_1) else dequantize
        expanded = [expand(piece, stored.ggml_type).to(dtype).flatten() for piece in pieces]
        return torch.cat(expanded).reshape(shape)


def _architecture(head: Head) -> str:
    architecture = head.keys.get("general.architecture")
    if not isinstance(architecture, str):
        raise CheckpointError(
            f"general.architecture: {architecture!r:.100}; must be the name of a family"
        )
    return architecture


def _further_parts(path: Path, architecture: str, keys: Mapping[str, Any]) -> list[GgufHeader]:
    """The heads of all parts after the first, each in its place."""
    count, paths = keys.get("split.count", 1), parts_of(path)
    if type(count) is not int or count > MAX_PARTS:
        raise CheckpointError(f"split.count: {count!r:.100}; must be a number up to {MAX_PARTS:,}")
    if len(paths) != max(1, count) or path != paths[0]:
        raise CheckpointError(
            f"it is one of {count} parts: name the first, ...-00001-of-{count:05}.gguf, beside the "
            "others"
        )
    headers = []
    for number, part in enumerate(paths[1:], 1):
        try:
            head = read_head(part)
        except CheckpointError as error:
            raise CheckpointError(f"{part.name}: {error}") from None
        if (head.keys.get("split.no"), head.keys.get("split.count")) != (number, count):
            raise CheckpointError(f"{part.name} is not part {number + 1} of {count} of this model")
        headers.append(head.as_header(part, architecture))
    return headers
