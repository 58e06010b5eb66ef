"""The calls of a graph: the SDK's ops check their arguments, the log learns them."""

from __future__ import annotations

import operator
from collections import Counter
from typing import Any

import torch
from rebel.rules import require
from torch import Tensor, fx

_SDK_NAMESPACES = ("rbln_custom_ops", "rbln", "rbln_triton_ops")


class Calls:
    """The calls of ``module``, whose nodes have an ``example_value``.

    ``sdk_ops`` are the calls of the SDK's ops with a description of each argument, in order;
    ``others`` counts the rest by name; ``linear_ranks`` are the axes of what linear layers take.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        """Raises what an op of the SDK says of its arguments."""
        self.sdk_ops: list[list[Any]] = []
        self.others: Counter[str] = Counter()
        self.linear_ranks: set[int] = set()

        def example(node: fx.Node) -> Any:
            # What Dynamo gives to attributes, weights and constants, the rule ``meta`` leaves out.
            if "example_value" not in node.meta and node.op == "get_attr":
                return operator.attrgetter(node.target)(module)
            return node.meta["example_value"]

        with torch.no_grad():
            for node in module.graph.nodes:
                if node.op == "call_method":
                    self.others[f"Tensor.{node.target}"] += 1
                if node.op != "call_function":
                    continue
                name = _name(node.target)
                if name.split("::")[0] in _SDK_NAMESPACES:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), example)
                    described = [describe(value) for value in (*args, *kwargs.values())]
                    self.sdk_ops.append([name, described])
                    node.target(*args, **kwargs)
                else:
                    self.others[name] += 1
                if name.endswith("linear"):
                    self.linear_ranks.add(example(node.args[0]).dim())


def _name(target: Any) -> str:
    if isinstance(target, torch._ops.OpOverload):
        return str(target._schema.name)
    if isinstance(target, torch._ops.OpOverloadPacket):
        return str(target._qualified_op_name)
    return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"


def describe(value: Any) -> str:
    """``float32 5d`` for a tensor, the value itself for anything else."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {value.dim()}d"
    return repr(value)


def on_host(module: fx.GraphModule) -> fx.GraphModule:
    """A copy of the module that makes its tensors on the CPU, where the double computes."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, {}))

    def moved(value: Any) -> Any:
        elsewhere = isinstance(value, torch.device) and value.type != "cpu"
        named = isinstance(value, str) and value.split(":")[0] in ("rbln", "privateuseone")
        return torch.device("cpu") if elsewhere or named else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
    return fx.GraphModule(module, graph)


def check_metadata(module: fx.GraphModule) -> None:
    """Rule ``meta``; an assignment into a tensor has no value."""
    nodes = [node for node in module.graph.nodes if node.op.startswith("call_")]
    computing = [node for node in nodes if node.target is not operator.setitem]
    bare = [node.name for node in computing if "example_value" not in node.meta]
    require("meta", not bare, f"{len(bare)} of {len(computing)} nodes have none, as {bare[:3]}")


def check_names(module: fx.GraphModule) -> None:
    """Rule ``names``: patterns of Dynamo's graphs know an operator by its packet."""
    for node in module.graph.nodes:
        overload = isinstance(node.target, torch._ops.OpOverload) and node.target._overloadname
        require("names", overload != "default", f"{node.name} calls {node.target}")
