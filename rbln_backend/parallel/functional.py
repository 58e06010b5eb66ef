"""Rewriting of a graph's collectives to torch's functional ones, which other compilers support.

The RBLN SDK resolves the name of a process group to its ranks through the option
``process_group_dict``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from rbln_backend.parallel.collectives import Group, collective_name
from rbln_backend.vllm_compat.surface import get_dp_group, get_pp_group, get_tp_group

_SUM = "sum"


def process_group_dict() -> dict[str, list[int]]:
    """Return the ranks of every process group of this process by its name, also of one rank."""
    return {
        str(process_group.group_name): list(group.ranks)
        for group in (get_tp_group(), get_pp_group(), get_dp_group())
        for process_group in (group.device_group, group.cpu_group)
    }


def use_functional_ops(graph: fx.Graph, groups: Mapping[str, Group]) -> None:
    """Replace every collective of ``graph``; raise ``KeyError`` for an unknown group."""
    for node in list(graph.nodes):
        name = collective_name(node.target)
        if name is None:
            continue
        with graph.inserting_before(node):
            node.replace_all_uses_with(_WRITERS[name](graph, node, groups[node.args[-1]]))
        graph.erase_node(node)


def _call(graph: fx.Graph, op: Callable[..., object], *args: Any) -> fx.Node:
    done = graph.call_function(op, args)
    return graph.call_function(torch.ops._c10d_functional.wait_tensor.default, (done,))


def _all_reduce(graph: fx.Graph, node: fx.Node, group: Group) -> fx.Node:
    op = torch.ops._c10d_functional.all_reduce.default
    return _call(graph, op, node.args[0], _SUM, group.process_group.group_name)


def _all_gather(graph: fx.Graph, node: fx.Node, group: Group) -> fx.Node:
    x, dim, world_size, _ = node.args
    op = torch.ops._c10d_functional.all_gather_into_tensor.default
    rows = _call(graph, op, x, world_size, group.process_group.group_name)
    return _moved(graph, rows, world_size, source=0, target=dim)


def _reduce_scatter(graph: fx.Graph, node: fx.Node, group: Group) -> fx.Node:
    x, dim, world_size, _ = node.args
    rows = _moved(graph, x, world_size, source=dim, target=0)
    op = torch.ops._c10d_functional.reduce_scatter_tensor.default
    return _call(graph, op, rows, _SUM, world_size, group.process_group.group_name)


def _moved(graph: fx.Graph, x: Any, world_size: Any, *, source: Any, target: Any) -> fx.Node:
    """Return the parts of ``x`` along ``source``, concatenated along ``target``.

    The functional collectives support the first dimension alone.
    """
    if source == target:
        return x  # type: ignore[no-any-return]
    parts = graph.call_function(torch.chunk, (x, world_size, source))
    return graph.call_function(torch.cat, (parts, target))


_WRITERS: Mapping[str, Callable[[fx.Graph, fx.Node, Group], fx.Node]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
}
