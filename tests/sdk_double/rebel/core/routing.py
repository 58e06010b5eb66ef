"""Rule ``routing``: from a router's logits to the weights of experts there is one chain."""

from __future__ import annotations

from typing import Any

import torch
from rebel.core.axes import called, node_shape, since
from rebel.rules import require
from torch import fx

_WEIGHTS = "masked_routing_weight"
# Of vllm_rbln/model_executor/layers/fused_moe/runner/moe_runner.py, in place or not.
_CHAIN = frozenset(
    (
        *"reshape transpose permute expand unsqueeze getitem zeros_like".split(),
        *"topk max softmax sigmoid gather scatter add sum mul".split(),
        "truediv",
        "clamp_min",
    )
)
# Where a chain begins: a collective gathers what the routers of several engines say.
_ROUTERS = frozenset(("linear", "wait_tensor"))


def check_routing(module: fx.GraphModule) -> None:
    """Look at every node on a way from a router to the weights that an op for experts takes."""
    for op in module.graph.nodes:
        weights = _get_weights(op)
        if weights is None:
            continue
        chain = [node for node in since(_ROUTERS, weights) if called(node) not in _ROUTERS]
        table = node_shape(weights)
        for node in chain:
            is_cast = called(node) == "to" and called(node.all_input_nodes[0]) in _ROUTERS
            require(
                "routing",
                called(node) in _CHAIN or is_cast,
                f"{node.name} is {called(node)!r} before {op.name}",
            )
            size = torch.Size(node_shape(node)).numel()
            wide = f"{node.name} is {list(node_shape(node))}, the weights of experts {list(table)}"
            require("routing", size <= torch.Size(table).numel(), wide)
        names = [called(node) for node in chain if called(node) in ("topk", "scatter")]
        told = f"{op.name} gets what {names} give"
        require("routing", names[-1:] == ["scatter"] and "topk" in names, told)


def _get_weights(op: fx.Node) -> fx.Node | None:
    """The weights of experts that ``op`` takes; None if it is not one for experts."""
    schema: Any = getattr(getattr(op.target, "default", op.target), "_schema", None)
    if op.op != "call_function" or schema is None:
        return None
    names = [argument.name for argument in schema.arguments]
    return op.args[names.index(_WEIGHTS)] if _WEIGHTS in names else None  # type: ignore[return-value]
