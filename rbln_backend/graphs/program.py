"""A program: a captured graph as plain data, with a name for the tensor behind each placeholder.

A stored program is a JSON document: ``format``, ``bindings`` (a tensor's name for each placeholder)
and ``nodes``. A node has an operator's name, arguments and keyword arguments. ``read_document`` is
the one check that everything stored has to pass, for loading, ``rbln-serve cache verify`` and
``import``; it resolves no operator to something callable. Only operators of ``operators`` can be
stored or loaded; arguments are numbers, strings, dtypes, slices, nested sequences and references to
earlier nodes.

Calls are checked by schema where torch has one, else by kind: Python callables of torch parse their
own arguments. Torch checks them when a start runs the program over tensors without memory
(``tensors.check_shapes``); here is refused what that run itself must not meet.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import fx
from torch._C import FunctionSchema

from rbln_backend.errors import CompileError, CorruptArtifactError
from rbln_backend.graphs.operators import get_schema, get_target, operator_name

MAX_ELEMENTS = 1 << 31
"""Of a tensor that is made of numbers alone."""

_RANGE = "torch.arange"
_MAKERS = frozenset(
    (
        f"{_RANGE} torch.empty torch.full torch.ones torch.zeros method.new_empty "
        "method.new_full method.new_ones method.new_zeros"
    ).split()
)
_INDEXING = ("operator.getitem", "operator.setitem")
_OPERANDS = {"operator.neg": 1, "operator.invert": 1, "operator.setitem": 3}
_KEYWORD = re.compile(r"_?[a-z][a-z0-9_]{0,31}")
_NUMBERS = (bool, int, float)


@dataclass(frozen=True, slots=True)
class Reference:
    """The result of an earlier node, as an argument."""

    node: int


_TYPES: Mapping[str, tuple[type, ...]] = {
    "Tensor": (Reference,),
    "List[Tensor]": (Reference,),
    "int": (int,),
    "SymInt": (int,),
    "float": (int, float),
    "bool": (bool,),
    "number": _NUMBERS,
    "str": (str,),
    "ScalarType": (torch.dtype,),
    "Device": (torch.device,),
    "MemoryFormat": (torch.memory_format,),
}


def _schema_mismatch(
    schema: FunctionSchema, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> str | None:
    """Why an op of ``schema`` cannot be called so, None where it can."""
    positional = [x for x in schema.arguments if not x.kwarg_only]
    if len(arguments) > len(positional):
        return f"takes {len(positional)} arguments by position, got {len(arguments)}"
    given = {x.name: value for x, value in zip(positional, arguments, strict=False)}
    for name, value in keywords.items():
        if name in given:
            return f"takes {name} once"
        given[name] = value
    unknown = given.keys() - {x.name for x in schema.arguments}
    if unknown:
        return f"has no argument {min(unknown)!r:.256}"
    for argument in schema.arguments:
        wanted = str(argument.real_type)
        if argument.name not in given:
            if not argument.has_default_value():
                return f"needs {argument.name}"
        elif not _has_type(given[argument.name], wanted):
            return f"takes {wanted} as {argument.name}, got {given[argument.name]!r:.256}"
    return None


def _callable_mismatch(
    name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> str | None:
    """Why the Python callable ``name`` must not be called so, None where it may."""
    for keyword in keywords:
        # The result would be written over another tensor, whose memory may move.
        if keyword == "out" or not _KEYWORD.fullmatch(keyword):
            return f"has no argument {keyword!r:.256}"
    values = [*arguments, *keywords.values()]
    for value in values:
        if isinstance(value, str):
            with contextlib.suppress(RuntimeError):
                torch.device(value)
                return "takes a device as such, got its name"
    if name in _MAKERS:
        # Bound the tensors that a program makes of numbers alone.
        shapes = [x for x in (*arguments, keywords.get("size")) if isinstance(x, list | tuple)]
        numbers = [abs(x) for x in (shapes[0] if shapes else values) if type(x) in (int, float)]
        elements = max(numbers, default=0) if name == _RANGE else math.prod(numbers)
        if elements > MAX_ELEMENTS:
            return f"makes {elements} elements; at most {MAX_ELEMENTS} are allowed"
        return None
    if not any(map(_has_reference, values)):
        return "takes the result of a node, got none"
    if name.startswith("operator."):
        count = _OPERANDS.get(name, 2)
        if len(values) != count or keywords:
            return f"takes {count} operands, got {len(values)}"
        # Python's operators repeat texts and sequences, and format texts.
        for operand in arguments[: 1 if name in _INDEXING else None]:
            if not isinstance(operand, Reference) and type(operand) not in _NUMBERS:
                return "takes results of nodes and numbers alone"
    return None


def _has_type(value: Any, wanted: str) -> bool:
    """Return True if ``value`` has a type of a schema, as torch writes it."""
    if type(value) in _TYPES.get(wanted, ()):
        return True
    if wanted.startswith("Optional["):
        return value is None or _has_type(value, wanted[len("Optional[") : -1])
    if wanted.startswith("List[") and isinstance(value, list | tuple):
        return all(_has_type(item, wanted[len("List[") : -1]) for item in value)
    return False


def _has_reference(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_reference, value))
    return isinstance(value, Reference)


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
_NAMED: dict[str, dict[str, Any]] = {
    kind.__name__: {
        str(x).removeprefix("torch."): x for x in vars(torch).values() if isinstance(x, kind)
    }
    for kind in (torch.dtype, torch.memory_format)
}
_NAMED["device"] = {"cpu": torch.device("cpu")}


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
            if record.operator == PLACEHOLDER:
                if number != self._num_inputs:
                    _refuse("a placeholder comes after another node")
                self._num_inputs += 1
            self._has_result.append(_check_call(record))
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
            if type(content) is not int or not 0 <= content < len(self._has_result):
                _refuse(f"{content!r:.20} is not the number of an earlier node")
            if not self._has_result[content]:
                _refuse(f"node {content} has no result")
            return Reference(content)
        if kind == "tuple":
            return self._items(content, depth)
        if kind == "slice":
            items = self._items(content, depth)
            if len(items) != 3:
                _refuse(f"a slice of {len(items)} parts")
            return slice(*items)
        return _constant(kind, content)

    def _items(self, values: Any, depth: int) -> tuple[Any, ...]:
        if depth == MAX_DEPTH or not isinstance(values, list) or len(values) > MAX_ITEMS:
            _refuse(f"sequences have at most {MAX_ITEMS} items and {MAX_DEPTH} levels")
        return tuple(self._value(value, depth + 1) for value in values)


_MEMBERS = (("op",), ("op", "args"), ("op", "args", "kwargs"))


def _refuse(reason: str) -> NoReturn:
    raise CorruptArtifactError(reason)


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
    """Return True if the node has a result; rejects a call that its operator does not allow."""
    if record.operator == PLACEHOLDER:
        return True
    if record.operator == OUTPUT:
        # A program returns one or more tensors, in one tuple or list.
        values = record.arguments[0] if len(record.arguments) == 1 else None
        if not isinstance(values, list | tuple) or record.keywords or not values:
            _refuse("the output is not one sequence")
        if not all(isinstance(value, Reference) for value in values):
            _refuse("the output is not a sequence of results")
        return False
    schema = get_schema(record.operator)
    if schema is None:
        mismatch = _callable_mismatch(record.operator, record.arguments, record.keywords)
    else:
        mismatch = _schema_mismatch(schema, record.arguments, record.keywords)
    if mismatch is not None:
        _refuse(f"{record.operator} {mismatch}")
    return bool(schema.returns) if schema is not None else record.operator != "operator.setitem"


@dataclass(frozen=True)
class Program:
    """``graph``'s placeholders are bound, in order, to the tensors that ``bindings`` name."""

    graph: fx.Graph
    bindings: tuple[str, ...]

    def to_bytes(self) -> bytes:
        """Serialise; raises ``CompileError`` naming the first operator that is not allowed."""
        index: dict[fx.Node, int] = {}
        nodes: list[dict[str, Any]] = []
        for node in self.graph.nodes:
            index[node] = len(nodes)
            nodes.append(_encode_node(node, index))
        return write_document(self.bindings, nodes)

    @classmethod
    def from_bytes(cls, data: bytes) -> Program:
        """Rebuild; raises ``CorruptArtifactError`` for anything that is not a valid program."""
        document = read_document(data)
        graph = fx.Graph()
        nodes: list[fx.Node] = []
        for record in document.nodes:
            arguments = _with_nodes(record.arguments, nodes)
            if record.operator == PLACEHOLDER:
                nodes.append(graph.placeholder(f"arg_{len(nodes)}"))
            elif record.operator == OUTPUT:
                graph.output(arguments[0])
            else:
                keywords = {name: _with_nodes(x, nodes) for name, x in record.keywords.items()}
                try:
                    op, target = get_target(record.operator)
                except CompileError as error:
                    raise CorruptArtifactError(f"the program cannot run here: {error}") from error
                nodes.append(graph.create_node(op, target, arguments, keywords))
        return cls(graph, document.bindings)

    def copy_of_graph(self) -> fx.Graph:
        """Return a graph that a caller may change."""
        graph = fx.Graph()
        graph.output(graph.graph_copy(self.graph, {}))
        return graph


def _with_nodes(value: Any, nodes: list[fx.Node]) -> Any:
    """An argument with nodes in place of references."""
    if isinstance(value, Reference):
        return nodes[value.node]
    if isinstance(value, list | tuple):
        items = [_with_nodes(item, nodes) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    if isinstance(value, slice):
        return slice(*(_with_nodes(x, nodes) for x in (value.start, value.stop, value.step)))
    return value


def _encode_node(node: fx.Node, index: dict[fx.Node, int]) -> dict[str, Any]:
    if node.op == "placeholder":
        return {"op": PLACEHOLDER}
    if node.op == "output":
        return {"op": OUTPUT, "args": _encode(node.args, index)}
    name = operator_name(node.op, node.target)
    if name is None:
        raise CompileError(f"operator {node.target} ({node.op}) cannot be stored")
    record: dict[str, Any] = {"op": name, "args": _encode(node.args, index)}
    if node.kwargs:
        record["kwargs"] = {key: _encode(value, index) for key, value in node.kwargs.items()}
    return record


def _encode(value: Any, index: dict[fx.Node, int]) -> Any:
    if isinstance(value, fx.Node):
        return {"node": index[value]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, list | tuple):
        items = [_encode(item, index) for item in value]
        return {"tuple": items} if isinstance(value, tuple) else items
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return {"slice": [_encode(part, index) for part in parts]}
    if isinstance(value, torch.dtype | torch.device | torch.memory_format):
        return {type(value).__name__: str(value).removeprefix("torch.")}
    if value is Ellipsis:
        return {"ellipsis": True}
    raise CompileError(f"argument {value!r} of type {type(value).__name__} cannot be stored")
