"""A program as the SDK is given graphs: what Dynamo would have handed to its backend.

The vendor goes through ``torch.compile``; docs/dev/decisions/12-npu.md says why this does not. A
graph's inputs are all its tensors, weights among them. What Dynamo says of each follows from its
name in the tensor table, so that it is the same in every graph, cold and warm: its source, a name
made of that, and a mark if it is a weight. Every node has its ``example_value``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import (
    AttrSource,
    DictGetItemSource,
    LocalSource,
    UnspecializedNNModuleSource,
    UnspecializedParamBufferSource,
)
from torch._dynamo.variables.builder import GraphArg
from torch._guards import (
    CompileContext,
    CompileId,
    Source,
    TracingContext,
    compile_context,
    tracing,
)
from torch._subclasses.fake_tensor import FakeTensorMode

from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import INPUT, PARAM, is_weight, make_tensors_on

_MARK = "_dynamo_static_input_type"


def get_module(
    program: Program, tensors: Sequence[Tensor], device: torch.device | None
) -> fx.GraphModule:
    """A copy of ``program`` whose placeholders are named as Dynamo names ``tensors`` [...].

    ``device``: where tensors lie that the graph makes, if not in host memory.
    """
    graph = fx.Graph()
    copies: dict[fx.Node, Any] = {}
    used: dict[str, int] = {}
    bound = zip(program.graph.find_nodes(op="placeholder"), program.bindings, tensors, strict=True)
    for node, binding, tensor in bound:
        source = get_source(binding, tensor)
        name = re.sub(r"[^a-zA-Z0-9]+", "_", source.name)
        # What is bound twice has two names: they are the parameters of a function.
        count = used[name] = used.get(name, -1) + 1
        copies[node] = graph.placeholder(f"{name}_{count}" if count else name)
        copies[node]._dynamo_source = source
    graph.output(graph.graph_copy(program.graph, copies))
    if device is not None:
        make_tensors_on(graph, device)
    for node in graph.nodes:
        # Dynamo names an op without its overload, and the SDK may know patterns of such names.
        target = node.target
        if isinstance(target, torch._ops.OpOverload) and target._overloadname == "default":
            node.target = target.overloadpacket
    return fx.GraphModule(nn.Module(), graph)


def get_source(binding: str, tensor: Tensor) -> Source:
    """Where Dynamo would find ``tensor`` [...] in the vendor's runner, whose model is ``model``."""
    kind, _, name = binding.partition(":")
    if not is_weight(binding):
        source = LocalSource(name if binding.startswith(INPUT) else kind, is_input=True)
        return source if binding.startswith(INPUT) else DictGetItemSource(source, name)
    owner, _, leaf = name.rpartition(".") if binding.startswith(PARAM) else (name, "", "")
    module: Source = AttrSource(LocalSource("self"), "model")
    for part in filter(None, owner.split(".")):
        modules = AttrSource(UnspecializedNNModuleSource(module), "_modules")
        module = DictGetItemSource(modules, part)
    module = UnspecializedNNModuleSource(module)
    if not leaf:
        return AttrSource(AttrSource(module, "impl"), kind)
    kept = "_parameters" if isinstance(tensor, nn.Parameter) else "_buffers"
    return DictGetItemSource(UnspecializedParamBufferSource(module, kept), leaf)


def mark(bindings: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Mark the weights among ``tensors`` [...] as Dynamo does, and nothing else.

    Dynamo itself marks what a module refers to, caches and adapters too, and only when it captures.
    """
    for binding, tensor in zip(bindings, tensors, strict=True):
        if is_weight(binding):
            torch._dynamo.mark_static_address(tensor)
        elif hasattr(tensor, _MARK):
            delattr(tensor, _MARK)


@contextmanager
def as_dynamo_calls(
    module: fx.GraphModule, inputs: Sequence[Tensor], number: int
) -> Iterator[None]:
    """Set up Dynamo's backend context for inputs [...]: the ``number``-th compile, no gradients."""
    mode, compile_id = FakeTensorMode(), CompileId(frame_id=number, frame_compile_id=0)
    with (
        torch.no_grad(),
        compile_context(CompileContext(compile_id)),
        tracing(TracingContext(mode)),
    ):
        fakes = [mode.from_tensor(x, static_shapes=True) for x in inputs]
        with mode:
            _Examples(module).run(*fakes)
        placeholders = module.graph.find_nodes(op="placeholder")
        for node, x, fake in zip(placeholders, inputs, fakes, strict=True):
            node.meta["tensor_dict"] = {_MARK: getattr(x, _MARK)} if hasattr(x, _MARK) else {}
            node.meta["grapharg"] = GraphArg(node._dynamo_source, x, False, fake)
        module.meta |= {
            "dynamo_flat_name_to_original_fqn": {},
            "dynamo_compile_id": compile_id,
            "backend_id": f"__compiled_fn_{number}",
        }
        # Not in ``meta`` with Dynamo either.
        module._param_name_to_source = {}  # type: ignore[assignment]
        yield


class _Examples(fx.Interpreter):
    """Leaves what each node gives as its ``example_value``, without computing it."""

    def run_node(self, n: fx.Node) -> Any:
        result = super().run_node(n)
        if n.op != "output":
            n.meta["example_value"] = result
        if n.op == "call_function":
            n.meta["source_fn_stack"] = [(n.name, n.target)]
        return result
