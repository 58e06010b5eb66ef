"""A program: a captured graph as plain data, with a name for the tensor behind each placeholder.

``Program.to_bytes`` and ``from_bytes`` are the artifact format. Only operators of
``compiler.operators`` can be stored or loaded; arguments are numbers, strings, dtypes, slices,
nested sequences and references to earlier nodes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rbln_backend.compiler.operators import Target, operator_name, resolve_operator
from rbln_backend.errors import CompileError, CorruptArtifactError

FORMAT = 1


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
        document = {"format": FORMAT, "bindings": list(self.bindings), "nodes": nodes}
        return json.dumps(document, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Program:
        """Rebuild; raises ``CorruptArtifactError`` for anything malformed."""
        try:
            document = json.loads(data)
            if document["format"] != FORMAT:
                raise CorruptArtifactError(f"program format {document['format']} is not {FORMAT}")
            graph = fx.Graph()
            nodes: list[fx.Node] = []
            for record in document["nodes"]:
                nodes.append(_decode_node(graph, record, nodes))
            graph.lint()
            program = cls(graph, tuple(map(str, document["bindings"])))
        except (CompileError, KeyError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise CorruptArtifactError(f"stored program cannot be read: {error}") from error
        if len(program.placeholders()) != len(program.bindings):
            raise CorruptArtifactError("stored program binds a different number of placeholders")
        return program

    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]


def _encode_node(node: fx.Node, index: dict[fx.Node, int]) -> dict[str, Any]:
    if node.op == "placeholder":
        return {"op": "placeholder"}
    if node.op == "output":
        return {"op": "output", "args": _encode(node.args, index)}
    target: Target = node.target
    name = operator_name(node.op, target)
    if name is None:
        raise CompileError(f"operator {node.target} ({node.op}) cannot be stored")
    record: dict[str, Any] = {"op": name, "args": _encode(node.args, index)}
    if node.kwargs:
        record["kwargs"] = {key: _encode(value, index) for key, value in node.kwargs.items()}
    return record


def _decode_node(graph: fx.Graph, record: dict[str, Any], nodes: list[fx.Node]) -> fx.Node:
    if record["op"] == "placeholder":
        return graph.placeholder(f"arg_{len(nodes)}")
    args = _decode(record["args"], nodes)
    if record["op"] == "output":
        output: fx.Node = graph.output(args[0])
        return output
    op, target = resolve_operator(record["op"])
    kwargs = {key: _decode(value, nodes) for key, value in record.get("kwargs", {}).items()}
    return graph.create_node(op, target, args, kwargs)


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


def _decode(value: Any, nodes: list[fx.Node]) -> Any:
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, list):
        return [_decode(item, nodes) for item in value]
    ((kind, content),) = value.items()
    if kind == "node":
        return nodes[content]
    if kind == "tuple":
        return tuple(_decode(item, nodes) for item in content)
    if kind == "slice":
        return slice(*(_decode(part, nodes) for part in content))
    return _decode_scalar(kind, content)


def _decode_scalar(kind: str, content: Any) -> Any:
    if kind == "float":
        return float.fromhex(content)
    if kind == "device":
        return torch.device(content)
    if kind == "ellipsis":
        return Ellipsis
    if kind in ("dtype", "memory_format"):
        found = getattr(torch, content, None)
        if isinstance(found, torch.dtype | torch.memory_format):
            return found
    raise CorruptArtifactError(f"stored program has an argument of unknown kind {kind!r}")
