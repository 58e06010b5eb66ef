"""A run of a graph without numbers: the SDK's ops check their arguments, the log learns them."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from rebel.rules import require
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

_SDK_NAMESPACES = ("rbln_custom_ops", "rbln", "rbln_triton_ops")


class Trace(fx.Interpreter):
    """Runs ``module`` on tensors that have shapes alone.

    ``sdk_ops`` are the calls of the SDK's ops with a description of each argument, in order;
    ``others`` counts the rest by name; ``linear_ranks`` are the axes of what linear layers take.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.sdk_ops: list[list[Any]] = []
        self.others: Counter[str] = Counter()
        self.linear_ranks: set[int] = set()

    def trace(self, inputs: Sequence[Any]) -> None:
        """Raises what an op says of its arguments."""
        with torch.no_grad(), self._mode:
            self.run(*(self._without_numbers(value) for value in inputs))

    def _without_numbers(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return torch.empty_strided(value.size(), value.stride(), dtype=value.dtype)

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Attributes are weights and constants."""
        return self._without_numbers(super().get_attr(target, args, kwargs))

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Note the call, then make it."""
        name = _name(target)
        if name.split("::")[0] in _SDK_NAMESPACES:
            arguments = [describe(value) for value in (*args, *kwargs.values())]
            self.sdk_ops.append([name, arguments])
        else:
            self.others[name] += 1
        if name.endswith("linear"):
            self.linear_ranks.add(args[0].dim())
        return super().call_function(target, args, kwargs)

    def call_method(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Methods of tensors are named as such."""
        self.others[f"Tensor.{target}"] += 1
        return super().call_method(target, args, kwargs)


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
