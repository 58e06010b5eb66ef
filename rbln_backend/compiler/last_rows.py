"""The rows whose logits are read, computed apart behind the last attention of a prefill graph.

Attention is the last that mixes tokens. Behind it a chunk needs the last row of each prompt for its
logits, and all rows only where hidden states are read.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

from torch import fx

from rbln_backend.compiler.examples import example, is_method, op_name, op_schema
from rbln_backend.emulator.ops import NAMESPACE
from rbln_backend.parallel.collectives import collective_name

_ROW_ARGUMENTS = {
    "linear": (0,),
    "quantized_linear": (0,),
    "rms_norm": (0,),
    "fused_add_rms_norm": (0, 1),
    "layer_norm": (0,),
    "activate": (0,),
    "moe_route": (0,),
    "moe": (0, 1, 2),
    "quantized_moe": (0, 1, 2),
}
"""Kernels that compute each row by itself: the places of their arguments with rows."""
_OTHER_ROWS = {"tokens_mask", "slots"}
"""Arguments of these calls that would need rows of their own."""
_TENSOR_PARALLEL = "tp"
"""The group whose ranks have the same rows."""
_BY_ELEMENT = (operator.add, operator.mul)


def compute_last_rows_apart(graph: fx.Graph) -> None:
    """Gather rows of hidden states right behind the last attention, where the graph gathers any.

    The calls that compute all rows of them come last. A graph with a call that writes to a tensor
    behind its last attention is left as it is.
    """
    nodes = list(graph.nodes)
    gather = _gather_of_output(nodes[-1])
    attention = [place for place, node in enumerate(nodes) if "attention" in op_name(node)]
    if gather is None or not attention:
        return
    behind = nodes[attention[-1] + 1 : -1]
    if any(_writes(node) for node in behind):
        return
    with graph.inserting_before(gather):
        gather.replace_all_uses_with(_Gathered(graph, gather, set(behind)).of(gather.args[0]))
    graph.erase_node(gather)
    _move_hidden_back(nodes[-1], [node for node in behind if node is not gather])


def _gather_of_output(output: fx.Node) -> fx.Node | None:
    """Return the call that gathers rows of the hidden states [L, H] that the graph returns."""
    results = output.args[0]
    if not isinstance(results, tuple) or len(results) < 2 or not isinstance(results[1], fx.Node):
        return None
    users = [user for user in results[1].users if is_method(user, "index_select")]
    return users[0] if len(users) == 1 and users[0].args[1] == 0 else None


def _writes(node: fx.Node) -> bool:
    schema = op_schema(node)
    if schema is not None:
        return bool(schema.is_mutable)
    return node.op == "call_method" and str(node.target).endswith("_")


class _Gathered:
    """Copies of calls that compute the gathered rows alone."""

    def __init__(self, graph: fx.Graph, gather: fx.Node, behind: set[fx.Node]) -> None:
        self._graph, self._behind = graph, behind
        self._dim, self._rows = gather.args[1:]
        self._made: dict[fx.Node, fx.Node] = {}

    def of(self, node: fx.node.Argument) -> fx.Node:
        """Return the gathered rows of what ``node`` computes, [L, ...] or a tuple of such."""
        assert isinstance(node, fx.Node)
        if node not in self._made:
            places = self._row_places(node)
            self._made[node] = self._copy(node, places) if places else self._gather(node)
        return self._made[node]

    def _row_places(self, node: fx.Node) -> tuple[int, ...]:
        """As the function; none for a call that comes before the attention's end."""
        places = _row_places(node) if node in self._behind else ()
        if node.target is operator.getitem and places:
            # Of a tuple, which cannot be gathered.
            source = node.args[0]
            return places if isinstance(source, fx.Node) and self._row_places(source) else ()
        return places

    def _copy(self, node: fx.Node, places: tuple[int, ...]) -> fx.Node:
        args = tuple(self.of(x) if n in places else x for n, x in enumerate(node.args))
        return self._graph.create_node(node.op, node.target, args, dict(node.kwargs))

    def _gather(self, node: fx.Node) -> fx.Node:
        return self._graph.call_method("index_select", (node, self._dim, self._rows))


def _row_places(node: fx.Node) -> tuple[int, ...]:
    """Return the places of the arguments with rows; none for a call that may mix rows."""
    if node.target is operator.getitem:
        # An index into a tensor, such as [1, L, H][0], takes rows away: another axis has them.
        results = op_schema(node.args[0])
        return (0,) if results is not None and len(results.returns) > 1 else ()
    if node.target in _BY_ELEMENT:
        return _equal_shapes(node)
    if collective_name(node.target) == "all_reduce":
        return (0,) if node.args[-1] == _TENSOR_PARALLEL else ()
    schema = op_schema(node)
    if schema is None:
        return ()
    names = [argument.name for argument in schema.arguments]
    given = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    if any(given.get(name) is not None for name in _OTHER_ROWS):
        return ()
    namespace, _, name = op_name(node).partition("::")
    return _ROW_ARGUMENTS.get(name, ()) if namespace == NAMESPACE else ()


def _equal_shapes(node: fx.Node) -> tuple[int, ...]:
    """Return the places of all tensors in ``node.args`` if they have the result's shape."""
    result, shapes = example(node), {}
    for place, argument in enumerate(node.args):
        if isinstance(argument, fx.Node):
            value = example(argument)
            shapes[place] = None if value is None else value.shape
    if result is None or any(shape != result.shape for shape in shapes.values()):
        return ()
    return tuple(shapes)


def _move_hidden_back(output: fx.Node, behind: Sequence[fx.Node]) -> None:
    """Move the calls ``behind`` that nothing but hidden states needs to the end, in their order."""
    results = output.args[0]
    assert isinstance(results, tuple)
    needed = set[fx.Node]()
    waiting = [node for place, node in enumerate(results) if place != 1]
    while waiting:
        node = waiting.pop()
        if isinstance(node, fx.Node) and node not in needed:
            needed.add(node)
            waiting += node.all_input_nodes
    for node in behind:
        if node not in needed:
            output.prepend(node)
