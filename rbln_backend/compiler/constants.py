"""Arithmetic over weights alone, done once when a program is bound instead of at every step."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from rbln_backend.compiler.programs.program import Program
from rbln_backend.compiler.tensor_table import PARAM

# Every graph of an engine keeps results of its own: vectors are worth it, matrices are not.
_LIMIT_BYTES = 1 << 18


def fold_constants(program: Program, tensors: Sequence[Tensor]) -> tuple[fx.Graph, list[Tensor]]:
    """Return a copy of the graph and its inputs [...], with functions of small weights folded.

    Each folded value becomes an input. ``tensors`` [...] are those of the program's bindings.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    inputs = dict(zip(placeholders, tensors, strict=True))
    weights = {
        node: tensor
        for node, name, tensor in zip(placeholders, program.bindings, tensors, strict=True)
        if name.startswith(PARAM) and tensor.nbytes <= _LIMIT_BYTES
    }
    for node, value in _constants(graph, weights).items():
        if value.nbytes > _LIMIT_BYTES or all(user in weights for user in node.users):
            continue
        with graph.inserting_before(next(iter(graph.nodes))):
            constant = graph.placeholder(f"constant_{len(inputs)}")
        inputs[constant] = value
        node.replace_all_uses_with(constant)
    graph.eliminate_dead_code(is_impure_node=is_impure)
    for node in [node for node in inputs if not node.users]:
        graph.erase_node(node)
    return graph, [inputs[node] for node in graph.nodes if node.op == "placeholder"]


def is_impure(node: fx.Node) -> bool:
    """Return True if ``node`` has side effects; fx treats in-place methods as pure."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    return node.target is operator.setitem or node.is_impure()


def _constants(graph: fx.Graph, weights: dict[fx.Node, Tensor]) -> dict[fx.Node, Tensor]:
    """The values of the calls over ``weights`` and over one another; ``weights`` grows by them."""
    written, found = _written(graph), {}
    for node in graph.nodes:
        over = node.all_input_nodes
        if not over or not node.op.startswith("call") or not all(x in weights for x in over):
            continue
        if is_impure(node) or node in written:
            continue
        args = fx.node.map_arg(node.args, weights.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, weights.__getitem__)
        with torch.no_grad():
            value = _call(node, args, kwargs)
        if isinstance(value, Tensor):
            weights[node] = found[node] = value
    return found


def _call(node: fx.Node, args: tuple[object, ...], kwargs: dict[str, object]) -> object:
    if node.op == "call_method":
        return getattr(args[0], str(node.target))(*args[1:], **kwargs)
    assert callable(node.target)
    return node.target(*args, **kwargs)


def _written(graph: fx.Graph) -> set[fx.Node]:
    """Return the storages that are written in place, under any name."""
    names: set[fx.Node] = set()
    for node in graph.nodes:
        target = node.args[0] if is_impure(node) and node.args else None
        while isinstance(target, fx.Node):
            names.add(target)
            target = target.args[0] if target.args else None
    return names
