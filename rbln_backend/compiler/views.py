"""Rewrites that leave out what only gives a tensor another shape or another place."""

from __future__ import annotations

import operator

import torch
from torch import Tensor, fx

from rbln_backend.compiler.examples import (
    example,
    is_method,
    same_layout,
    shape_arguments,
    viewed,
)


def elide_output_buffers(graph: fx.Graph) -> None:
    """``buffer = empty(s); buffer.view(t).copy_(x); ... buffer.view(u)`` becomes ``x.reshape(u)``.

    vLLM's attention layer hands the backend a fresh output buffer. A buffer that is filled by
    exactly one whole copy and only viewed otherwise is the copied value under another name.
    """
    for buffer in [node for node in graph.nodes if node.target is torch.empty]:
        names = _names_of(buffer)
        writes = [user for name in names for user in name.users if is_method(user, "copy_")]
        if len(writes) == 1 and writes[0].args[0] in names:
            _replace_buffer(graph, names, writes[0])


def _names_of(buffer: fx.Node) -> list[fx.Node]:
    """``buffer`` and every view of it or of its views, in the graph's order."""
    names = [buffer]
    for name in names:
        names += [user for user in name.users if is_method(user, "view", "reshape")]
    return names


def _replace_buffer(graph: fx.Graph, names: list[fx.Node], copy: fx.Node) -> None:
    source, target = copy.args[1], example(copy.args[0])
    value, order = example(source), {node: place for place, node in enumerate(graph.nodes)}
    readers = {user for name in names for user in name.users} - {copy} - set(names)
    if value is None or target is None or not isinstance(source, fx.Node) or copy.users:
        return
    if value.dtype != target.dtype or value.shape != target.shape:
        return
    if any(order[reader] < order[copy] or reader.op == "output" for reader in readers):
        return
    for name in names:
        read = [user for user in name.users if user in readers]
        shown = example(name)
        if not read or shown is None:
            continue
        with graph.inserting_before(copy):
            replacement = graph.call_method("reshape", (source, *shape_arguments(shown.shape)))
        replacement.meta["example_value"] = value.reshape(shown.shape)
        for user in read:
            user.replace_input_with(name, replacement)
    graph.erase_node(copy)
    for name in reversed(names):
        if not name.users:
            graph.erase_node(name)


def simplify_views(graph: fx.Graph) -> None:
    """Chains of views become one, and those that change nothing none."""
    for node in list(graph.nodes):
        shown = example(node)
        if shown is None:
            continue
        if is_method(node, "view", "reshape"):
            _shorten(node, shown)
        elif is_method(node, "permute"):
            _undo_permutation(node, shown)
        elif node.target is operator.getitem and _is_slicing(node.args[1]):
            _drop_if_idle(node, node.args[0], shown)


def _is_slicing(index: object) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is Ellipsis or isinstance(part, slice) for part in parts)


def _shorten(node: fx.Node, shown: Tensor) -> None:
    """Rebase a view on its earliest equivalent source tensor."""
    for source in reversed(viewed(node)[1:]):
        value = example(source)
        assert value is not None
        if _drop_if_idle(node, source, shown):
            return
        try:
            direct = value.view(shown.shape)
        except (RuntimeError, ValueError):
            continue
        if same_layout(direct, shown):
            node.target = "view"
            node.args = (source, *shape_arguments(shown.shape))
            return


def _undo_permutation(node: fx.Node, shown: Tensor) -> None:
    inner = node.args[0]
    if is_method(inner, "permute") and isinstance(inner, fx.Node):
        _drop_if_idle(node, inner.args[0], shown)


def _drop_if_idle(node: fx.Node, source: object, shown: Tensor) -> bool:
    """Replace ``node`` by ``source`` where both are the same view of the same memory."""
    value = example(source)
    if not isinstance(source, fx.Node) or value is None or not same_layout(value, shown):
        return False
    node.replace_all_uses_with(source)
    return True
