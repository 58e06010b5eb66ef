"""Kinds of graph inputs: weights, KV caches and step inputs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rebel.compile_context import CompileContext
from rebel.core.axes import called
from rebel.device import check_reachable, is_device_tensor, storage_id
from rebel.rules import require
from torch import Tensor, fx, nn

_PARTS = frozenset(("getitem", "unsqueeze"))

Kind = Literal["weight", "static", "device", "host", "number"]
_MARK = "_dynamo_static_input_type"


@dataclass(frozen=True)
class Input:
    """A placeholder, what it stands for, and the tensor or number it was compiled with."""

    name: str
    kind: Kind
    value: Any
    source: str | None = None
    """Where Dynamo says that it comes from."""
    mark: str | None = None
    """Of Dynamo, on tensors whose content is said not to change."""

    @property
    def is_fixed(self) -> bool:
        return self.kind == "weight" or (self.kind != "static" and self.mark is not None)

    def describe(self) -> dict[str, Any]:
        if not isinstance(self.value, Tensor):
            return {"name": self.name, "kind": self.kind, "type": type(self.value).__name__}
        return {
            "name": self.name,
            "kind": self.kind,
            "device": self.value.device.type,
            "dtype": str(self.value.dtype).removeprefix("torch."),
            "shape": [int(size) for size in self.value.shape],
            "source": self.source,
            "mark": self.mark,
        }


def classify(
    module: fx.GraphModule, example_inputs: Sequence[Any], context: CompileContext | None
) -> list[Input]:
    """The inputs in order; raises where a tensor has no content that a device could see."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    return [
        Input(
            node.name,
            _kind(node.name, value, context),
            value,
            getattr(_source_of(node), "name", None),
            getattr(value, _MARK, None),
        )
        for node, value in zip(nodes, example_inputs, strict=True)
    ]


def _source_of(node: fx.Node) -> Any:
    return getattr(node.meta.get("grapharg"), "source", None)


def _kind(name: str, value: Any, context: CompileContext | None) -> Kind:
    if not isinstance(value, Tensor):
        return "number"
    if context is not None and context.kv.get_key_name(value) is not None:
        return "static"
    check_reachable(name, value)
    if isinstance(value, nn.Parameter):
        return "weight"
    return "device" if is_device_tensor(value) else "host"


def attributes(module: fx.GraphModule) -> Iterator[tuple[str, Tensor]]:
    """Tensors that the graph itself owns, by the name it calls them."""
    seen = set()
    for node in module.graph.nodes:
        if node.op == "get_attr" and node.target not in seen:
            seen.add(node.target)
            value: Any = module
            for part in str(node.target).split("."):
                value = getattr(value, part)
            if isinstance(value, Tensor):
                yield str(node.target), value


def computed_of_weights(module: fx.GraphModule, inputs: Sequence[Input]) -> list[str]:
    """Names of what is called with weights and constants alone, and so could be done once.

    A part of a weight, and one with an axis more, are weights themselves.
    """
    weights = {given.name for given in inputs if given.kind == "weight"}
    constant: dict[fx.Node, bool] = {}
    found = set()
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            constant[node] = node.op == "get_attr" or node.name in weights
        elif node.op != "output":
            constant[node] = all(constant[source] for source in node.all_input_nodes)
            if constant[node] and node.all_input_nodes and called(node) not in _PARTS:
                found.add(called(node))
    return sorted(found)


def check_weights(
    module: fx.GraphModule, inputs: Sequence[Input], context: CompileContext | None
) -> None:
    """Rule ``weights``, for placeholders and attributes alike."""
    if context is None:
        return
    caches = frozenset(context.kv.get_key_name(x.value) or "" for x in inputs if x.kind == "static")
    owned = {name for name, _ in [*module.named_parameters(), *module.named_buffers()]}
    for name, weight in attributes(module):
        if name in owned:
            context.name_weight(name, weight, caches)
    for given in inputs:
        if given.kind == "weight":
            context.name_weight(given.name, given.value, caches)


def check_marks(module: fx.GraphModule, inputs: Sequence[Input]) -> None:
    """Rule ``marks``; as Dynamo gives the vendor's graphs."""
    nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, given in zip(nodes, inputs, strict=True):
        if not isinstance(given.value, Tensor):
            continue
        source = _source_of(node)
        require("marks", source is not None, f"{given.name} has no source")
        if source is None:
            continue
        name = re.sub(r"[^a-zA-Z0-9]+", "_", source.name)
        require("marks", node.target.startswith(name), f"{node.target} comes from {source.name}")
        is_owned = given.kind == "weight" or source.guard_source.is_unspecialized_nn_module()
        marks = given.mark, node.meta.get("tensor_dict", {}).get(_MARK)
        wanted = "unguarded" if is_owned else None
        kept = marks == (wanted, wanted)
        require("marks", kept, f"{source.name} has {marks}, not {wanted} twice")


def check_contiguous(module: fx.GraphModule, inputs: Sequence[Input]) -> None:
    """Rule ``contiguous``; as ``_make_weights_contiguous`` of vllm_rbln's runner states it."""
    owned = list(attributes(module))
    given = [(x.name, x.value) for x in inputs if x.kind == "weight"]
    for name, weight in (*owned, *given):
        strides = f"{name} has the strides {list(weight.stride())}"
        require("contiguous", weight.is_contiguous(), strides)


def check_aliases(inputs: Sequence[Input], values: Sequence[Any]) -> None:
    """Rule ``aliases``; as vllm_rbln/v1/sample/rbln_rejection_sampler.py states it of inputs."""
    spans: dict[int, list[tuple[int, int, str]]] = {}
    for given, value in zip(inputs, values, strict=True):
        if given.kind not in ("host", "device") or value.numel() == 0:
            continue
        size = value.element_size()
        start = value.storage_offset() * size
        reach = sum((n - 1) * step for n, step in zip(value.size(), value.stride(), strict=True))
        end = start + (reach + 1) * size
        for other_start, other_end, name in spans.setdefault(storage_id(value), []):
            apart = end <= other_start or other_end <= start
            require("aliases", apart, f"{name} and {given.name} share memory")
        spans[storage_id(value)].append((start, end, given.name))


def check_kv(module: fx.GraphModule, inputs: Sequence[Input]) -> None:
    """Rule ``static``: the cache that an attention op reads is the device's."""
    kinds = {given.name: given.kind for given in inputs}
    for node in module.graph.nodes:
        # Dynamo's graphs call the op, those of torch.export one overload of it.
        schema = getattr(getattr(node.target, "default", node.target), "_schema", None)
        if node.op != "call_function" or schema is None:
            continue
        places = [n for n, argument in enumerate(schema.arguments) if argument.name == "kv_cache"]
        for place in places:
            source = _source(node.args[place])
            kind = kinds.get(source.name, source.op)
            kept = kind in ("static", "device")
            require("static", kept, f"the KV cache {source.name} of {schema.name} is {kind}")


def _source(node: fx.Node) -> fx.Node:
    """The placeholder or attribute that ``node`` is a view of."""
    while node.op not in ("placeholder", "get_attr") and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return node
