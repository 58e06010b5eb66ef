"""`CacheKey`: the identity of an artifact, as named JSON fields and their digest.

Invariants (tests/unit/test_bundle.py): the digest depends on the fields' names and
values only, never on insertion order, process or machine; a key cannot change once made.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import TypeAlias

JsonValue: TypeAlias = (
    "bool | int | float | str | Sequence[JsonValue] | Mapping[str, JsonValue] | None"
)
"""JSON values; of sequences, only strings, lists and tuples."""

DIGEST_CHARS = 32
"""Length of a digest: 128 bits of a SHA-256 in hexadecimal."""


class CacheKey:
    """Fields that identify an artifact; equal fields give equal keys.

    Tuples count as lists. Raises `TypeError` for a value that JSON cannot hold, naming where.
    """

    __slots__ = ("_digest", "_fields")

    def __init__(self, fields: Mapping[str, JsonValue]) -> None:
        canonical = canonical_json(fields)
        # Decoding the bytes makes a copy that callers cannot change.
        self._fields: Mapping[str, JsonValue] = MappingProxyType(json.loads(canonical))
        self._digest = hashlib.sha256(canonical).hexdigest()[:DIGEST_CHARS]

    @property
    def digest(self) -> str:
        """The first 32 hexadecimal characters of the SHA-256 of the canonical JSON."""
        return self._digest

    @property
    def fields(self) -> Mapping[str, JsonValue]:
        """The fields as JSON values, read-only."""
        return self._fields

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CacheKey) and self._digest == other._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"CacheKey({self._digest})"


def canonical_json(obj: JsonValue) -> bytes:
    """Return the canonical form of a JSON value: sorted keys, no spaces, ASCII, finite numbers.

    Raises `TypeError` for other values, with the path to them.
    """
    _check(obj, "$")
    plain = json.dumps(
        obj, sort_keys=True, separators=(",", ":"), allow_nan=False, default=_plain_mapping
    )
    return plain.encode("ascii")


def diff(a: CacheKey, b: CacheKey) -> list[str]:
    """Return one line per field of b that differs from a's; empty when equal."""
    left, right = _flatten(a.fields, ""), _flatten(b.fields, "")
    lines = []
    for name in sorted({*left, *right}):
        if name not in left:
            lines.append(f"{name}: added, {right[name]}")
        elif name not in right:
            lines.append(f"{name}: removed, was {left[name]}")
        elif left[name] != right[name]:
            lines.append(f"{name}: {left[name]} -> {right[name]}")
    return lines


def _plain_mapping(value: object) -> object:
    """Convert mappings for json.dumps; `_check` has rejected all other types."""
    assert isinstance(value, Mapping)
    return dict(value)


def _check(value: object, path: str) -> None:
    if value is None or isinstance(value, bool | int | str):
        return
    if isinstance(value, float):
        # NaN and the infinities have no JSON spelling and would break equality.
        if not math.isfinite(value):
            raise TypeError(f"{path} is {value!r}, which JSON cannot hold")
        return
    if isinstance(value, Mapping):
        for name, item in value.items():
            if not isinstance(name, str):
                raise TypeError(f"{path} has the key {name!r}, must be a string")
            _check(item, f"{path}.{name}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _check(item, f"{path}[{index}]")
    else:
        raise TypeError(f"{path} is a {type(value).__name__}, which JSON cannot hold")


def _flatten(value: JsonValue, path: str) -> dict[str, str]:
    """Map dotted paths to the JSON text of the leaves; lists without mappings are leaves."""
    leaves: dict[str, str] = {}
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            leaves |= _flatten(item, f"{path}.{name}" if path else name)
        return leaves
    if isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
        for index, item in enumerate(value):
            leaves |= _flatten(item, f"{path}[{index}]")
        return leaves
    return {path: canonical_json(value).decode()} if path else {}


_GRAPH_SOURCES = (
    *("collectives.py", "core.py", "devices", "layers", "lora", "models"),
    *("graphs/call_list.py", "graphs/capture.py", "graphs/operators.py", "graphs/program.py"),
    *("graphs/tensors.py", "worker/draft_model.py", "worker/graph_functions.py"),
    "worker/inputs.py",
)


@cache
def sources_digest() -> str:
    """Return the SHA-256 of the sources, part of every graph's key against old programs."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for entry in _GRAPH_SOURCES:
        path = root / entry
        files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
        for file in files:
            if file.suffix in (".py", ".cpp", ".h"):
                digest.update(file.relative_to(root).as_posix().encode())
                digest.update(file.read_bytes())
    return digest.hexdigest()
