"""The stored form of a program, and the one check that everything stored has to pass.

A document is JSON: ``format``, ``bindings`` (a tensor's name for each placeholder) and ``nodes``.
A node has an operator's name, arguments and keyword arguments. ``read_document`` is what loading,
``rbln-serve cache verify`` and ``import`` use; it resolves no operator to something callable.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from rbln_backend.compiler.programs.call_checks import (
    Reference,
    callable_mismatch,
    schema_mismatch,
)
from rbln_backend.compiler.programs.operators import schema_of
from rbln_backend.errors import CompileError, CorruptArtifactError

FORMAT = 1
MAX_BYTES = 32 << 20
MAX_NODES = 1 << 18
MAX_DEPTH = 4
"""Of sequences in sequences, in an argument."""
MAX_INTEGER = 2**63 - 1
MAX_TEXT = 256
MAX_ITEMS = 1 << 16

PLACEHOLDER, OUTPUT = "placeholder", "output"
_BINDING = re.compile(r"(param|scale|alibi|kv|lora|input|packed):[!-~]{1,512}")
_DTYPES = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.dtype)
}
_MEMORY_FORMATS = {
    str(value).removeprefix("torch."): value
    for value in vars(torch).values()
    if isinstance(value, torch.memory_format)
}
_NAMED: Mapping[str, Mapping[str, Any]] = {
    "dtype": _DTYPES,
    "memory_format": _MEMORY_FORMATS,
    "device": {"cpu": torch.device("cpu")},
}


@dataclass(frozen=True, slots=True)
class NodeRecord:
    """One node; a ``Reference`` among its arguments stands for the result of an earlier one."""

    operator: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Document:
    """A checked program: placeholders first, then calls, then one output."""

    bindings: tuple[str, ...]
    nodes: tuple[NodeRecord, ...]


def write_document(bindings: Sequence[str], nodes: Sequence[Mapping[str, Any]]) -> bytes:
    """The bytes of a program; raises ``CompileError`` where ``read_document`` would refuse them."""
    document = {"format": FORMAT, "bindings": list(bindings), "nodes": list(nodes)}
    data = json.dumps(document, separators=(",", ":")).encode()
    try:
        read_document(data)
    except CorruptArtifactError as error:
        raise CompileError(f"the program cannot be stored: {error}") from error
    return data


def read_document(data: bytes) -> Document:
    """Decode and check a program; raises ``CorruptArtifactError`` naming node and reason."""
    if len(data) > MAX_BYTES:
        raise CorruptArtifactError(f"a program of {len(data)} bytes; at most {MAX_BYTES} are read")
    try:
        document = json.loads(data)
        written = json.dumps(document, separators=(",", ":")).encode()
    except (ValueError, RecursionError) as error:
        raise CorruptArtifactError(f"the program is not JSON: {error}") from None
    # Then no byte stands for nothing: no second key of one name, no spaces.
    if written != data:
        raise CorruptArtifactError("the program is not in canonical form")
    return _Reader().read(document)


class _Reader:
    """Checks the nodes of one document, in order."""

    def __init__(self) -> None:
        self._has_result: list[bool] = []
        self._num_inputs = 0

    def read(self, document: Any) -> Document:
        if not isinstance(document, dict) or list(document) != ["format", "bindings", "nodes"]:
            _refuse("the program has not exactly the members format, bindings and nodes")
        if type(document["format"]) is not int or document["format"] != FORMAT:
            _refuse(f"program format {document['format']!r:.20} is not {FORMAT}")
        bindings, nodes = document["bindings"], document["nodes"]
        if not isinstance(bindings, list) or not isinstance(nodes, list):
            _refuse("bindings and nodes of a program are lists")
        if not 0 < len(nodes) <= MAX_NODES:
            _refuse(f"the program has {len(nodes)} nodes, must have 1 to {MAX_NODES}")
        for name in bindings:
            if not isinstance(name, str) or not _BINDING.fullmatch(name):
                _refuse(f"{name!r:.{MAX_TEXT}} is not the name of a tensor")
        records = tuple(self._node(number, nodes) for number in range(len(nodes)))
        if self._num_inputs != len(bindings):
            _refuse(f"{self._num_inputs} placeholders have {len(bindings)} names of tensors")
        return Document(tuple(bindings), records)

    def _node(self, number: int, nodes: Sequence[Any]) -> NodeRecord:
        try:
            record = self._record(nodes[number])
            if (record.operator == OUTPUT) != (number == len(nodes) - 1):
                _refuse("the last node, and no other, is the output")
            self._has_result.append(self._check(record, number))
        except (CompileError, CorruptArtifactError, TypeError, ValueError) as error:
            raise CorruptArtifactError(f"node {number} of the program: {error}") from None
        return record

    def _record(self, node: Any) -> NodeRecord:
        if not isinstance(node, dict) or tuple(node) not in _MEMBERS:
            _refuse("a node has the members op, args and kwargs")
        name, keywords = node["op"], node.get("kwargs", {"": None})
        if not isinstance(name, str) or len(name) > MAX_TEXT:
            _refuse("op is not the name of an operator")
        if (name == PLACEHOLDER) != ("args" not in node):
            _refuse("placeholders, and no other nodes, have no arguments")
        arguments = self._value(node.get("args", {"tuple": []}))
        if not isinstance(arguments, tuple) or not isinstance(keywords, dict) or not keywords:
            _refuse("args is not a tuple, or kwargs not an object with members")
        named = {key: self._value(value) for key, value in keywords.items() if "kwargs" in node}
        return NodeRecord(name, arguments, named)

    def _check(self, record: NodeRecord, number: int) -> bool:
        """Return True if the node has a result; rejects calls that its operator does not allow."""
        if record.operator == PLACEHOLDER:
            if number != self._num_inputs:
                _refuse("a placeholder comes after another node")
            self._num_inputs += 1
            return True
        if record.operator == OUTPUT:
            _check_output(record)
            return False
        return _check_call(record)

    def _value(self, value: Any, depth: int = 0) -> Any:
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, int):
            if abs(value) > MAX_INTEGER:
                _refuse(f"an integer of more than {MAX_INTEGER.bit_length() + 1} bits")
            return value
        if isinstance(value, str):
            if len(value) > MAX_TEXT:
                _refuse(f"a text of {len(value)} characters; at most {MAX_TEXT} are read")
            return value
        if isinstance(value, list):
            return list(self._items(value, depth))
        if not isinstance(value, dict) or len(value) != 1:
            _refuse(f"an argument of type {type(value).__name__}")
        ((kind, content),) = value.items()
        if kind == "node":
            return self._reference(content)
        if kind in ("tuple", "slice"):
            items = self._items(content, depth)
            return items if kind == "tuple" else _slice(items)
        return _constant(kind, content)

    def _items(self, values: Any, depth: int) -> tuple[Any, ...]:
        if depth == MAX_DEPTH or not isinstance(values, list) or len(values) > MAX_ITEMS:
            _refuse(f"sequences have at most {MAX_ITEMS} items and {MAX_DEPTH} levels")
        return tuple(self._value(value, depth + 1) for value in values)

    def _reference(self, node: Any) -> Reference:
        if type(node) is not int or not 0 <= node < len(self._has_result):
            _refuse(f"{node!r:.20} is not the number of an earlier node")
        if not self._has_result[node]:
            _refuse(f"node {node} has no result")
        return Reference(node)


_MEMBERS = (("op",), ("op", "args"), ("op", "args", "kwargs"))


def _refuse(reason: str) -> NoReturn:
    raise CorruptArtifactError(reason)


def _slice(items: tuple[Any, ...]) -> slice:
    if len(items) != 3:
        _refuse(f"a slice of {len(items)} parts")
    return slice(*items)


def _constant(kind: str, content: Any) -> Any:
    if kind == "ellipsis" and content is True:
        return Ellipsis
    if not isinstance(content, str):
        _refuse(f"an argument of unknown kind {kind!r:.{MAX_TEXT}}")
    if kind == "float":
        value = float.fromhex(content)
        if value.hex() != content:
            _refuse(f"{content!r:.{MAX_TEXT}} is not how {value!r} is written")
        return value
    found = _NAMED.get(kind, {}).get(content)
    if found is None:
        _refuse(f"an argument of unknown kind or value: {kind!r:.40}, {content!r:.40}")
    return found


def _check_call(record: NodeRecord) -> bool:
    """Return True if the call has a result; rejects one that its operator does not allow."""
    schema = schema_of(record.operator)
    if schema is None:
        mismatch = callable_mismatch(record.operator, record.arguments, record.keywords)
    else:
        mismatch = schema_mismatch(schema, record.arguments, record.keywords)
    if mismatch is not None:
        _refuse(f"{record.operator} {mismatch}")
    return bool(schema.returns) if schema is not None else record.operator != _WITHOUT_RESULT


def _check_output(record: NodeRecord) -> None:
    """A program returns one or more tensors, in one tuple or list."""
    values = record.arguments[0] if len(record.arguments) == 1 else None
    if not isinstance(values, list | tuple) or record.keywords or not values:
        _refuse("the output is not one sequence")
    if not all(isinstance(value, Reference) for value in values):
        _refuse("the output is not a sequence of results")


_WITHOUT_RESULT = "operator.setitem"
