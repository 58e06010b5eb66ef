"""Names for every tensor a graph may read or write, the tensors behind the names, and their shapes.

A captured graph's inputs are recognised by identity, a stored program's by name. Names:
``param:<path>`` (a parameter or buffer of the model), ``scale:<layer>`` (an attention layer's
softmax scale), ``alibi:<layer>`` (its slopes), ``kv:<layer>`` (its KV cache), ``lora:<name>``
(slots of adapters), ``input:<name>`` (a step's buffer, per graph) and ``packed:<path>`` (a weight
in the kernels' layout, made once on first use).
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from rbln_backend.errors import CompileError, CorruptArtifactError
from rbln_backend.graphs.program import Program

PACKED = "packed:"
PARAM = "param:"
INPUT = "input:"
KV = "kv:"
ADAPTERS = "lora:"


def is_weight(name: str) -> bool:
    """Return True for what no step and no request changes: weights, buffers and scales."""
    return not name.startswith((INPUT, KV, ADAPTERS))


Pack = Callable[[Tensor], Tensor]


class TensorTable:
    """Binds names to tensors; ``pack`` copies a weight into the packed layout.

    ``pack_consuming`` may use the memory of the weight it is given, which is not read again.
    """

    def __init__(self, pack: Pack, pack_consuming: Pack | None = None) -> None:
        self._pack = pack
        self._pack_consuming = pack_consuming or pack
        self._consumed: set[int] = set()
        self._tensors: dict[str, Tensor] = {}
        self._names: dict[int, str] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        """Register ``tensor`` [...]; a second name for the same tensor is an alias of the first."""
        self._tensors[name] = tensor
        self._names.setdefault(id(tensor), name)

    def add_model(self, model: nn.Module) -> None:
        for path, parameter in model.named_parameters(remove_duplicate=False):
            self.add(f"{PARAM}{path}", parameter)
        for path, buffer in model.named_buffers(remove_duplicate=False):
            self.add(f"{PARAM}{path}", buffer)

    def get_key_name(self, tensor: Tensor, inputs: Mapping[str, Tensor]) -> str:
        """Return the name of a graph input [...]; raises ``CompileError`` for an unknown tensor."""
        for input_name, candidate in inputs.items():
            if candidate is tensor:
                return f"{INPUT}{input_name}"
        name = self._names.get(id(tensor))
        if name is None:
            raise CompileError(
                f"the graph reads a tensor of shape {tuple(tensor.shape)} that is neither a weight,"
                " a KV cache nor a step input; it cannot be bound in another process"
            )
        return name

    def knows(self, tensor: Tensor) -> bool:
        """Return True if ``tensor``, of any shape [...], has a name other than a step input's."""
        return id(tensor) in self._names

    def resolve(self, name: str, inputs: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor [...] of a stored name; raises ``CompileError`` if there is none."""
        if name.startswith(INPUT):
            found = inputs.get(name.removeprefix(INPUT))
        elif name.startswith(PACKED):
            found = self._packed(name)
        else:
            found = self._tensors.get(name)
            if found is not None:
                self._refuse_consumed(name, found)
        if found is None:
            raise CompileError(f"the program binds {name!r}, which this model does not have")
        return found

    def resolve_all(self, names: Iterable[str], inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the tensors [...] of a program's placeholders; raises ``CompileError``."""
        return [self.resolve(name, inputs) for name in names]

    def get_shapes(self, names: Iterable[str], inputs: Mapping[str, Tensor]) -> list[Tensor]:
        """Return meta tensors, shapes [...] and dtypes as those of ``names``; packs nothing."""
        return [self._get_shape(name, inputs) for name in names]

    def _get_shape(self, name: str, inputs: Mapping[str, Tensor]) -> Tensor:
        own = inputs.get(name.removeprefix(INPUT)) if name.startswith(INPUT) else None
        found = own if own is not None else self._tensors.get(name)
        if found is not None:
            return as_meta(found)
        original = self._original(name) if name.startswith(PACKED) else None
        if original is None:
            raise CompileError(f"the program binds {name!r}, which this model does not have")
        try:
            return self._pack(as_meta(original))
        except (RuntimeError, ValueError) as error:
            raise CompileError(f"the program binds {name!r}, which has no packed form") from error

    def pack_weights(self, bindings: Iterable[str]) -> None:
        """Pack what ``bindings``, those of every program, name as packed, one weight at a time.

        A weight that no program reads as it is gives its memory to its packed form. The parameter
        then keeps its shape over one element, so that a later capture still sees it.
        """
        names = set(bindings)
        plain = {_storage(self._tensors[name]) for name in names if name in self._tensors}
        # Every tensor once, whatever its aliases.
        every = {id(tensor): tensor for tensor in self._tensors.values()}
        owners = Counter(map(_storage, every.values()))
        for name in sorted(name for name in names if name.startswith(PACKED)):
            original = self._original(name)
            if name in self._tensors or original is None:
                continue
            storage = _storage(original)
            if storage in plain or owners[storage] > 1:
                self._tensors[name] = self._pack(original.data)
                continue
            self._tensors[name] = self._pack_consuming(original.data)
            original.data = original.new_empty(1).expand(original.shape)
            self._consumed.add(id(original))

    def _packed(self, name: str) -> Tensor | None:
        original = self._original(name)
        if name not in self._tensors and original is not None:
            self._refuse_consumed(name, original)
            self._tensors[name] = self._pack(original.data)
        return self._tensors.get(name)

    def _original(self, packed_name: str) -> Tensor | None:
        return self._tensors.get(PARAM + packed_name.removeprefix(PACKED))

    def _refuse_consumed(self, name: str, tensor: Tensor) -> None:
        if id(tensor) in self._consumed:
            raise CompileError(
                f"the program reads {name!r}, of which only the packed form was kept; warm-up did "
                "not see this program"
            )


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


MAX_RESULT_BYTES = 1 << 34
"""Of what one call makes."""

_META = torch.device("meta")
_FACTORIES = (torch.arange, torch.empty, torch.full, torch.ones, torch.zeros)


def as_meta(tensor: Tensor) -> Tensor:
    """Return a tensor on meta with the shape [...], strides and dtype of ``tensor``."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)


def check_shapes(program: Program, inputs: Sequence[Tensor]) -> None:
    """Raise ``CorruptArtifactError`` if the calls of a program do not fit its inputs [...]."""
    if any(node.op == "call_method" and node.target == "item" for node in program.graph.nodes):
        return
    graph = program.copy_of_graph()
    make_tensors_on(graph, _META)
    values: dict[fx.Node, Any] = dict(zip(graph.find_nodes(op="placeholder"), inputs, strict=True))
    with torch.no_grad():
        for node in graph.nodes:
            if node.op in ("call_function", "call_method"):
                values[node] = _result(node, values)
    results = [values[x] for x in next(reversed(graph.nodes)).all_input_nodes]
    if not all(isinstance(x, Tensor) for x in results):
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
    if (
        is_arithmetic
        and function not in (operator.getitem, operator.setitem)
        and not all(isinstance(x, Tensor | bool | int | float) for x in args)
    ):
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
