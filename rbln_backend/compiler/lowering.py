"""Lowering of captured graphs for the emulated device, to calls of its kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from rbln_backend.compiler.attention_lowering import fuse_attention
from rbln_backend.compiler.constants import is_impure
from rbln_backend.compiler.examples import example, is_method
from rbln_backend.compiler.last_rows import compute_last_rows_apart
from rbln_backend.compiler.programs.program import Program
from rbln_backend.compiler.tensor_table import PACKED, PARAM
from rbln_backend.compiler.views import elide_output_buffers, simplify_views
from rbln_backend.emulator.packing import PACKABLE_DTYPES, can_pack

_LINEAR_TARGETS = (torch._C._nn.linear, torch.nn.functional.linear)
_ACTIVATIONS = {
    torch._C._nn.gelu: "gelu",
    torch.nn.functional.gelu: "gelu",
    torch.nn.functional.silu: "silu",
    torch.nn.functional.softplus: "softplus",
    torch.sigmoid: "sigmoid",
    torch.nn.functional.sigmoid: "sigmoid",
    "sigmoid": "sigmoid",
}
_LAYER_NORM = ("weight", "bias", "eps")


def lower_graph(program: Program, *, pack_linear: bool) -> Program:
    """A new program over a copy of the graph; ``program`` is left as it was.

    ``pack_linear``: the native kernels are there, so linears read packed weights and whatever has
    a kernel calls it.
    """
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    bindings = dict(zip(_placeholders(graph), program.bindings, strict=True))
    elide_output_buffers(graph)
    if pack_linear:
        fuse_attention(graph)
        _pack_linears(graph, bindings)
        _call_kernels(graph)
    _elide_casts(graph)
    simplify_views(graph)
    graph.eliminate_dead_code(is_impure_node=is_impure)
    if pack_linear:
        compute_last_rows_apart(graph)
    _erase_unused_placeholders(graph, bindings)
    graph.lint()
    return Program(graph, tuple(bindings[node] for node in _placeholders(graph)))


def _placeholders(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "placeholder"]


def _pack_linears(graph: fx.Graph, bindings: dict[fx.Node, str]) -> None:
    packed_of: dict[str, fx.Node] = {}
    for node in [n for n in graph.nodes if n.target in _LINEAR_TARGETS]:
        activation, weight, bias = (*node.args, node.kwargs.get("bias"))[:3]
        name, matrix = bindings.get(weight, ""), example(weight)
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


def _call_kernels(graph: fx.Graph) -> None:
    """PyTorch's functions that have a kernel; see ``emulator.ops``."""
    ops = torch.ops.rbln_emulator
    for node in list(graph.nodes):
        value = example(node)
        if value is None or value.dtype not in PACKABLE_DTYPES:
            continue
        if (function := _activation(node)) is not None:
            node.op, node.target = "call_function", ops.activate.default
            node.args = (node.args[0], function, False)
        elif node.target is torch.nn.functional.layer_norm and _is_plain_norm(node):
            weight, bias, eps = (_given(node, 2 + i, n) for i, n in enumerate(_LAYER_NORM))
            eps = 1e-5 if eps is None else eps
            node.target, node.args = ops.layer_norm.default, (node.args[0], weight, bias, eps)
        else:
            continue
        node.kwargs = {}


def _activation(node: fx.Node) -> str | None:
    """The name of the kernel's function that computes what the node does, if there is one."""
    if node.op not in ("call_function", "call_method") or node.target not in _ACTIVATIONS:
        return None
    function, x = _ACTIVATIONS[node.target], example(node.args[0])
    if x is None or x.dtype not in PACKABLE_DTYPES or x.dim() == 0:
        return None
    if function == "gelu":
        return "gelu_tanh" if _given(node, 1, "approximate") == "tanh" else "gelu"
    # In place, or a softplus of another shape.
    is_plain = len(node.args) == 1 and not any(node.kwargs.values())
    return function if is_plain else None


def _given(node: fx.Node, place: int, name: str) -> Any:
    """An argument passed by place or by name, None where it is not passed."""
    return node.args[place] if len(node.args) > place else node.kwargs.get(name)


def _is_plain_norm(node: fx.Node) -> bool:
    """Over the last dimension, and all of one dtype."""
    x, shape = example(node.args[0]), _given(node, 1, "normalized_shape")
    scales = (example(_given(node, 2, "weight")), example(_given(node, 3, "bias")))
    same = all(scale is None or x is None or scale.dtype == x.dtype for scale in scales)
    return x is not None and same and len(shape) == 1


def _elide_casts(graph: fx.Graph) -> None:
    """Drop ``x.to(dtype)`` and its like where x already has the dtype."""
    for node in list(graph.nodes):
        if not is_method(node, "to", "float", "long", "contiguous"):
            continue
        before, after = (example(value) for value in (node.args[0], node))
        if before is None or after is None or before.dtype != after.dtype:
            continue
        if before.stride() == after.stride() and before.device == after.device:
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


def _erase_unused_placeholders(graph: fx.Graph, bindings: dict[fx.Node, str]) -> None:
    for node in _placeholders(graph):
        if not node.users:
            del bindings[node]
            graph.erase_node(node)
