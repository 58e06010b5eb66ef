"""The shapes of a program over given tensors, found without memory and without computing."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from rbln_backend.compiler.programs.program import Program
from rbln_backend.errors import CorruptArtifactError

MAX_RESULT_BYTES = 1 << 34
"""Of what one call makes."""

_META = torch.device("meta")
_INDEXING = (operator.getitem, operator.setitem)
_FACTORIES = (torch.arange, torch.empty, torch.full, torch.ones, torch.zeros)


def as_meta(tensor: Tensor) -> Tensor:
    """Return a tensor on meta with the shape [...], strides and dtype of ``tensor``."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def check_shapes(program: Program, inputs: Sequence[Tensor]) -> None:
    """Raise ``CorruptArtifactError`` if the calls of a program do not fit its inputs [...]."""
    if any(node.op == "call_method" and node.target == "item" for node in program.graph.nodes):
        return
    graph = fx.Graph()
    graph.output(graph.graph_copy(program.graph, {}))
    make_tensors_on(graph, _META)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    values: dict[fx.Node, Any] = dict(zip(placeholders, inputs, strict=True))
    with torch.no_grad():
        for node in graph.nodes:
            if node.op in ("call_function", "call_method"):
                values[node] = _result(node, values)
            elif node.op == "output" and not _are_tensors(values[x] for x in node.all_input_nodes):
                raise CorruptArtifactError("the output is not a sequence of tensors")


def make_tensors_on(graph: fx.Graph, device: torch.device) -> None:
    """Programs are captured over host tensors: whatever names a device names the host."""

    def moved(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in graph.nodes:
        node.args = fx.node.map_aggregate(node.args, moved)
        node.kwargs = fx.node.map_aggregate(node.kwargs, moved)
        if node.target in _FACTORIES and "device" not in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}


def _result(node: fx.Node, values: Mapping[fx.Node, Any]) -> Any:
    """Return the result of a call, bounded in size."""
    args = fx.node.map_arg(node.args, values.__getitem__)
    kwargs = fx.node.map_arg(node.kwargs, values.__getitem__)
    function: Any = getattr(Tensor, str(node.target)) if node.op == "call_method" else node.target
    # Python would repeat a sequence, as often as a number says.
    is_arithmetic = node.op == "call_function" and function.__module__ == operator.add.__module__
    if is_arithmetic and function not in _INDEXING and not all(map(_is_operand, args)):
        raise CorruptArtifactError(f"{node.name} calculates with what is no tensor")
    try:
        result = function(*args, **kwargs)
    except Exception as error:
        # Whatever an operator says of arguments that do not fit together.
        reason = str(error).partition("\n")[0]
        raise CorruptArtifactError(f"{node.name} does not fit its arguments: {reason}") from error
    tensors = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
    size = max((x.untyped_storage().nbytes() for x in tensors), default=0)
    if size > MAX_RESULT_BYTES:
        raise CorruptArtifactError(
            f"{node.name} makes {size} bytes; at most {MAX_RESULT_BYTES} are allowed"
        )
    return result


def _are_tensors(values: Iterable[Any]) -> bool:
    return all(isinstance(value, Tensor) for value in values)


def _is_operand(value: Any) -> bool:
    return isinstance(value, Tensor | bool | int | float)
