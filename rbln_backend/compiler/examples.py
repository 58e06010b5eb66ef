"""Facts of captured nodes: the op that each calls, and the example tensor that capture leaves."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx
from torch.fx.node import Argument


def example(node: object) -> Tensor | None:
    """Return the example tensor [...] of ``node``; None if it is no node or makes no tensor."""
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, Tensor) else None


def op_schema(node: object) -> torch.FunctionSchema | None:
    """Return the schema of the torch op that ``node`` calls, with or without its overload."""
    target = node.target if isinstance(node, fx.Node) else None
    if isinstance(target, torch._ops.OpOverloadPacket):
        target = getattr(target, target.overloads()[0])
    return target._schema if isinstance(target, torch._ops.OpOverload) else None


def op_name(node: object) -> str:
    """Return ``namespace::name`` of the torch op that ``node`` calls, "" if it calls none."""
    schema = op_schema(node)
    return "" if schema is None else str(schema.name)


def same_layout(a: Tensor, b: Tensor) -> bool:
    """Return True if a and b, both [...], have equal shape, strides, offset and dtype."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.storage_offset() != b.storage_offset():
        return False
    strides = zip(a.shape, a.stride(), b.stride(), strict=True)
    return all(size <= 1 or of_a == of_b for size, of_a, of_b in strides)


def add_method(graph: fx.Graph, name: str, source: fx.Node, *args: Argument) -> fx.Node:
    """Append ``source.name(*args)`` at the graph's insertion point, with its example."""
    node = graph.call_method(name, (source, *args))
    value = example(source)
    assert value is not None
    node.meta["example_value"] = getattr(value, name)(*args)
    return node


def is_method(node: object, *names: str) -> bool:
    """Return True if ``node`` calls one of these methods."""
    return isinstance(node, fx.Node) and node.op == "call_method" and node.target in names


def viewed(node: fx.Node) -> list[fx.Node]:
    """``node`` and what it shows in another shape, each a view of the next; all have examples."""
    chain = [node]
    while is_method(chain[-1], "view", "reshape", "flatten", "unflatten"):
        source = chain[-1].args[0]
        if example(source) is None or not isinstance(source, fx.Node):
            break
        chain.append(source)
    return chain


def shape_arguments(sizes: Sequence[int]) -> tuple[tuple[int, ...]]:
    """The arguments of ``view`` and ``reshape`` that name every size."""
    return (tuple(int(size) for size in sizes),)
