"""Rule ``axes``: between the projections and an attention op nothing is computed of rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from rebel.rules import require
from torch import Tensor, fx

_NAMESPACES = ("rbln_custom_ops", "rbln_triton_ops")
# They show the same numbers: the vendor's own graphs have rows there, for a moment.
_VIEWS = frozenset(
    (
        *"view reshape flatten unflatten transpose permute unsqueeze t".split(),
        *"squeeze split chunk getitem contiguous expand narrow select".split(),
        "to",
        "float",
    )
)


_LINEAR_ENDS = ("add", "mul", "to")


def check_axes(module: fx.GraphModule) -> None:
    """Look at every node on a way from a linear layer to queries, keys or values of an op."""
    for op in module.graph.nodes:
        if not _is_attention(op):
            continue
        batch, length = node_shape(op.args[0])[0], node_shape(op.args[0])[-2]
        for node in _since_linear(op):
            shape = node_shape(node)
            has_axes = len(shape) > 2 and shape[0] == batch and length in shape[1:]
            require(
                "axes",
                has_axes or called(node) in _VIEWS or _ends_linear(node),
                f"{node.name} is {list(shape)} before {op.name}, whose batch is {batch} and whose "
                f"sequence is {length}",
            )


def _since_linear(op: fx.Node) -> Iterator[fx.Node]:
    """The linear layers that ``op`` reads first, and what is computed of them for it."""
    given = [argument for argument in op.args[:3] if isinstance(argument, fx.Node)]
    return (node for node in since(("linear",), *given) if node_shape(node))


def since(starts: Collection[str], *ends: fx.Node) -> list[fx.Node]:
    """The calls of ``starts`` that ``ends`` read first, and what is computed of them, in order."""
    reaches: dict[fx.Node, bool] = {}

    def follow(node: fx.Node) -> bool:
        if node not in reaches:
            # What writes to a tensor reads it as well.
            reaches[node] = called(node) in starts
            if not reaches[node]:
                # A list, because every way is looked at.
                found = [follow(source) for source in (*node.all_input_nodes, *_writers(node))]
                reaches[node] = any(found)
        return reaches[node]

    for end in ends:
        follow(end)
    return [node for node in (ends[0].graph.nodes if ends else ()) if reaches.get(node)]


def _writers(node: fx.Node) -> list[fx.Node]:
    """The methods that write to ``node``, whose results may be left unused."""
    users = [user for user in node.users if user.op == "call_method" and user.args[0] is node]
    return [user for user in users if str(user.target).endswith("_")]


def _ends_linear(node: fx.Node) -> bool:
    """A linear layer of the vendor's quantised forms computes rows, and adds its bias to them."""
    name = called(node)
    if name == "linear":
        return True
    sources = node.all_input_nodes
    return name in _LINEAR_ENDS and any(_ends_linear(source) for source in sources)


def _is_attention(node: fx.Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        target = target.overloadpacket
    if not isinstance(target, torch._ops.OpOverloadPacket):
        return False
    namespace, _, name = str(target._qualified_op_name).partition("::")
    return namespace in _NAMESPACES and ("attention" in name or "mla" in name)


def called(node: fx.Node) -> str:
    """The name of what ``node`` calls; that of a method that writes is the other's."""
    return str(getattr(node.target, "__name__", node.target)).strip("_")


def node_shape(node: Any) -> tuple[int, ...]:
    """Of a node's tensor; none of a tuple, which has its parts."""
    value = node.meta.get("example_value")
    return tuple(value.shape) if isinstance(value, Tensor) else ()
