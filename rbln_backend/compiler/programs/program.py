"""A program: a captured graph as plain data, with a name for the tensor behind each placeholder.

``Program.to_bytes`` and ``from_bytes`` are the artifact format; ``programs.document`` says what it
holds and checks it. Only operators of ``programs.operators`` can be stored or loaded; arguments
are numbers, strings, dtypes, slices, nested sequences and references to earlier nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from rbln_backend.compiler.programs.call_checks import Reference
from rbln_backend.compiler.programs.document import (
    OUTPUT,
    PLACEHOLDER,
    Document,
    NodeRecord,
    read_document,
    write_document,
)
from rbln_backend.compiler.programs.operators import Target, operator_name, target_of
from rbln_backend.errors import CompileError, CorruptArtifactError


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
        try:
            return cls(_graph_of(document), document.bindings)
        except CompileError as error:
            raise CorruptArtifactError(f"the program cannot run here: {error}") from error

    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]


def _graph_of(document: Document) -> fx.Graph:
    graph = fx.Graph()
    nodes: list[fx.Node] = []
    for record in document.nodes:
        nodes.append(_node_of(graph, record, nodes))
    return graph


def _node_of(graph: fx.Graph, record: NodeRecord, nodes: list[fx.Node]) -> fx.Node:
    if record.operator == PLACEHOLDER:
        return graph.placeholder(f"arg_{len(nodes)}")
    arguments = tuple(_with_nodes(value, nodes) for value in record.arguments)
    if record.operator == OUTPUT:
        output: fx.Node = graph.output(arguments[0])
        return output
    op, target = target_of(record.operator)
    keywords = {name: _with_nodes(value, nodes) for name, value in record.keywords.items()}
    return graph.create_node(op, target, arguments, keywords)


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
    target: Target = node.target
    name = operator_name(node.op, target)
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
