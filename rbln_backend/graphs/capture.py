"""Capture of one whole-model graph with Dynamo: one graph, no breaks, static shapes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn

from rbln_backend.errors import CompileError
from rbln_backend.graphs.program import Program
from rbln_backend.graphs.tensors import TensorTable


class _CapturedError(Exception):
    """Ends Dynamo's work once there is a graph.

    What would follow serves later calls, of which there are none: guards, an eighth of the time,
    and a first run, which would take a large model minutes without our kernels.
    """


def capture(
    function: nn.Module | Callable[..., Any],
    args: tuple[Tensor, ...],
    table: TensorTable,
    inputs: Mapping[str, Tensor],
) -> Program:
    """Trace ``function(*args)``, args [...], into a program bound through ``table``.

    ``inputs`` names the step's buffers, which include ``args``. Nothing is computed: the graph is
    taken from Dynamo and thrown away as a callable. Raises ``CompileError`` when the model cannot
    be captured as one graph or reads a tensor without a name.
    """
    captured: list[Program] = []

    def take(graph_module: fx.GraphModule, _: list[Tensor]) -> NoReturn:
        captured.append(_bind(graph_module, table, inputs))
        raise _CapturedError

    _reset()
    try:
        # With gradients on, what the model writes to the KV caches would be traced for autograd.
        with torch.no_grad():
            torch.compile(function, backend=take, fullgraph=True, dynamic=False)(*args)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _CapturedError):
            raise error.inner_exception from error
    except torch._dynamo.exc.TorchDynamoException as error:
        raise CompileError(f"the model cannot be captured as one static graph: {error}") from error
    finally:
        _reset()
    if len(captured) != 1:
        raise CompileError(f"capture produced {len(captured)} graphs instead of one")
    return captured[0]


def _reset() -> None:
    """Let Dynamo forget. torch-rbln resets its device with it, which must have nothing to do."""
    npu = getattr(torch, "rbln", None)
    if npu is not None:
        npu.synchronize()
    torch._dynamo.reset()


def _bind(module: fx.GraphModule, table: TensorTable, inputs: Mapping[str, Tensor]) -> Program:
    graph = module.graph
    for node in graph.nodes:
        # A program holds no tensors.
        if node.op in ("get_attr", "call_module"):
            raise CompileError(f"the graph embeds {node.target!r}; it cannot be stored as data")
    _drop_inert_nodes(graph)
    for node in graph.nodes:
        if node.target is torch.tensor and isinstance(node.args[0], int | float):
            # It could hold any data; this holds a number alone.
            node.target, node.args = torch.full, ((), node.args[0])
        elif node.target is getattr and node.args[1] == "T":
            # An attribute, which no stored program may ask for; of a matrix it is ``x.t()``.
            node.op, node.target, node.args = "call_method", "t", node.args[:1]
    bindings = []
    for node in [node for node in graph.nodes if node.op == "placeholder"]:
        example = getattr(node.meta.get("grapharg"), "example", None)
        if not isinstance(example, Tensor):
            if node.users:
                raise CompileError(f"graph input {node.name!r} is not a tensor")
            graph.erase_node(node)
        elif example.dim() == 0 and not table.knows(example):
            # A number that the model's code keeps as a tensor is the same wherever that code runs.
            first = next(n for n in graph.nodes if n.op != "placeholder")
            with graph.inserting_before(first):
                full = graph.call_function(
                    torch.full, ((), example.item()), {"dtype": example.dtype}
                )
            full.meta = dict(node.meta)
            node.replace_all_uses_with(full)
            graph.erase_node(node)
        else:
            bindings.append(table.get_key_name(example, inputs))
    return Program(graph, tuple(bindings))


def _drop_inert_nodes(graph: fx.Graph) -> None:
    """Erase what computes nothing here, where weights are constant and nothing is differentiated.

    These are ``weight.data``, dropout outside training, gradient and autocast modes that a model
    sets around a part of itself, and torch's record of what is used.
    """
    # Backwards: the node that leaves an autocast region uses the one that enters it.
    for node in reversed(graph.nodes):
        if _name(node) == "_get_data_attr" or _is_idle_dropout(node):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif not node.users and (_is_idle_mode(node) or _name(node) == "_log_api_usage_once"):
            graph.erase_node(node)


def _name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", "") if node.op == "call_function" else ""


def _is_idle_dropout(node: fx.Node) -> bool:
    if node.target is not torch.nn.functional.dropout:
        return False
    given: Mapping[str, object] = dict(
        zip(("input", "p", "training"), node.args, strict=False)
    ) | dict(node.kwargs)
    return given.get("training") is False or given.get("p") in (0, 0.0)


def _is_idle_mode(node: fx.Node) -> bool:
    if node.target is torch._C._set_grad_enabled:
        return True
    if _name(node) == "_exit_autocast":
        return isinstance(node.args[0], fx.Node) and _is_idle_mode(node.args[0])
    # Arguments: device type, dtype, enabled, cache enabled.
    return _name(node) == "_enter_autocast" and node.args[2] is False
