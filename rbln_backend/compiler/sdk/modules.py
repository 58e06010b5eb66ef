"""A program as the SDK is given graphs: what Dynamo would have handed to its backend.

The vendor goes through ``torch.compile``; docs/dev/decisions/12-npu.md says why this does not. A
graph's inputs are all its tensors, weights among them, under names that come from the tensor table
and are the same in every graph, cold and warm. Every node has its ``example_value``.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode

from rbln_backend.compiler.programs.program import Program
from rbln_backend.compiler.programs.shapes import make_tensors_on


def module_of(program: Program, device: torch.device | None) -> fx.GraphModule:
    """A copy of ``program`` whose placeholders are named after what they are bound to.

    ``device``: where tensors lie that the graph makes, if not in host memory.
    """
    graph = fx.Graph()
    names = [input_name(binding) for binding in program.bindings]
    # What is bound twice has two names: they are the parameters of a function.
    counts = [names[:n].count(name) for n, name in enumerate(names)]
    names = [f"{n}_{count}" if count else n for n, count in zip(names, counts, strict=True)]
    copies: dict[fx.Node, Any] = {
        node: graph.placeholder(name)
        for node, name in zip(program.placeholders(), names, strict=True)
    }
    graph.output(graph.graph_copy(program.graph, copies))
    if device is not None:
        make_tensors_on(graph, device)
    for node in graph.nodes:
        # Dynamo names an op without its overload, and the SDK may know patterns of such names.
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._overloadname == "default":
            node.target = target.overloadpacket
    return fx.GraphModule(nn.Module(), graph)


def input_name(binding: str) -> str:
    """A name in Python of a name in the tensor table; no two have the same."""
    return f"{re.sub(r'[^0-9A-Za-z]+', '_', binding)}_{zlib.crc32(binding.encode()):08x}"


@contextmanager
def as_dynamo_calls(module: fx.GraphModule, inputs: Sequence[Tensor]) -> Iterator[None]:
    """Set up Dynamo's backend context: tracing context, no gradients, example inputs [...]."""
    mode = FakeTensorMode()
    with torch.no_grad(), tracing(TracingContext(mode)):
        fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
        with mode:
            _Examples(module).run(*fakes)
        yield


class _Examples(fx.Interpreter):
    """Leaves what each node gives as its ``example_value``, without computing it."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = result
        return result
