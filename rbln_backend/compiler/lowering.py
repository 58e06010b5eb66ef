"""Graph rewrites for the emulated device: packed linears and no copies into attention outputs."""

from __future__ import annotations

import operator

import torch
from torch import fx

from rbln_backend.compiler.program import Program
from rbln_backend.compiler.tensor_table import PACKED, PARAM
from rbln_backend.emulator.packing import can_pack

_LINEAR_TARGETS = (torch._C._nn.linear, torch.nn.functional.linear)


def lower_graph(program: Program, *, pack_linear: bool) -> Program:
    """A new program over a copy of the graph; ``program`` is left as it was."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    bindings = dict(zip(_placeholders(graph), program.bindings, strict=True))
    _elide_output_buffers(graph)
    if pack_linear:
        _pack_linears(graph, bindings)
    _elide_casts(graph)
    graph.eliminate_dead_code(is_impure_node=_is_impure)
    _erase_unused_placeholders(graph, bindings)
    graph.lint()
    return Program(graph, tuple(bindings[node] for node in _placeholders(graph)))


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _elide_output_buffers(graph: fx.Graph) -> None:
    """``buffer = empty(s); buffer.view(t).copy_(x); ... buffer.view(u)`` becomes ``x.view(u)``.

    vLLM's attention layer hands the backend a fresh output buffer. A buffer that is filled by
    exactly one whole copy and only viewed otherwise is the copied value under another name.
    """
    for copy in [n for n in graph.nodes if n.op == "call_method" and n.target == "copy_"]:
        view, source = copy.args[0], copy.args[1]
        buffer = _view_source(view)
        if buffer is None or not isinstance(source, fx.Node) or copy.users:
            continue
        if set(view.users) != {copy}:
            continue
        readers = [user for user in buffer.users if user is not view]
        if not all(user.op == "call_method" and user.target == "view" for user in readers):
            continue
        graph.erase_node(copy)
        graph.erase_node(view)
        for reader in readers:
            with graph.inserting_before(reader):
                replacement = graph.call_method("reshape", (source, *reader.args[1:]))
            reader.replace_all_uses_with(replacement)
            graph.erase_node(reader)
        graph.erase_node(buffer)


def _view_source(view: object) -> fx.Node | None:
    """The ``torch.empty`` behind one level of ``view``, or None."""
    if not (isinstance(view, fx.Node) and view.op == "call_method" and view.target == "view"):
        return None
    buffer = view.args[0]
    if isinstance(buffer, fx.Node) and buffer.target is torch.empty:
        return buffer
    return None


def _pack_linears(graph: fx.Graph, bindings: dict[fx.Node, str]) -> None:
    packed_of: dict[str, fx.Node] = {}
    for node in [n for n in graph.nodes if n.target in _LINEAR_TARGETS]:
        activation, weight, bias = (*node.args, node.kwargs.get("bias"))[:3]
        name, matrix = bindings.get(weight, ""), _example(weight)
        if not name.startswith(PARAM) or matrix is None or not can_pack(matrix):
            continue
        packed_name = PACKED + name.removeprefix(PARAM)
        if packed_name not in packed_of:
            with graph.inserting_before(_placeholders(graph)[0]):
                packed_of[packed_name] = graph.placeholder(f"packed_{len(packed_of)}")
            bindings[packed_of[packed_name]] = packed_name
        with graph.inserting_before(node):
            kernel = graph.call_function(
                torch.ops.rbln_emulator.linear.default,
                (activation, packed_of[packed_name], bias, matrix.shape[0]),
            )
        kernel.meta = dict(node.meta)
        node.replace_all_uses_with(kernel)
        graph.erase_node(node)


def _elide_casts(graph: fx.Graph) -> None:
    """Drop ``x.to(dtype)`` and its like where x already has the dtype."""
    for node in [n for n in graph.nodes if n.op == "call_method"]:
        if node.target not in ("to", "float", "long", "contiguous") or not node.args:
            continue
        before, after = (_example(value) for value in (node.args[0], node))
        if before is None or after is None or before.dtype != after.dtype:
            continue
        if before.stride() == after.stride() and before.device == after.device:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _example(node: object) -> torch.Tensor | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, torch.Tensor) else None


def _is_impure(node: fx.Node) -> bool:
    """fx takes in-place methods for pure; a write is never dead."""
    if node.op == "call_method":
        return str(node.target).endswith("_")
    return node.target is operator.setitem or node.is_impure()


def _erase_unused_placeholders(graph: fx.Graph, bindings: dict[fx.Node, str]) -> None:
    for node in _placeholders(graph):
        if not node.users:
            del bindings[node]
            graph.erase_node(node)
