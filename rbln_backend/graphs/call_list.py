"""An fx graph as a flat list of calls, run without generating Python source.

``fx.GraphModule`` writes a graph as source text and executes it. A stored graph must never become
text, so every graph of this package runs here: on the emulated device, and inside the module that
the RBLN SDK is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

from torch import Tensor, fx
from torch._ops import OpOverload

from rbln_backend.errors import CompileError

_Function = Callable[..., Any]


class CallList:
    """Callable that runs ``graph`` over its inputs, one per placeholder, in order.

    Values lie in numbered slots: inputs, constants, results. A step reads its arguments from their
    slots, makes one call and stores the result. The step that reads a result last releases it: the
    slot takes the step's own result, or is cleared.
    """

    def __init__(self, graph: fx.Graph) -> None:
        """Raises ``CompileError`` for a graph that embeds modules or tensors."""
        calls = _Calls(graph)
        slots, released = _get_slots(calls)
        count = max([*slots.values(), -1]) + 1
        rest: list[Any] = [None] * (count - calls.num_inputs)
        for value, constant in calls.constants.items():
            rest[slots[value] - calls.num_inputs] = constant
        self._rest = tuple(rest)
        self._steps = [
            _step(call.function, slots[call.result], [slots[x] for x in call.arguments], freed)
            for call, freed in zip(calls.made, released, strict=True)
        ]
        self._result = slots[calls.result]

    def __call__(self, *inputs: Any) -> Any:
        """Make the calls in order and return the graph's output."""
        slots = [*inputs, *self._rest]
        # Unpacking gathered arguments costs more than naming the few that most calls have.
        for function, target, count, first, second, third, gather, released in self._steps:
            if count == 2:
                slots[target] = function(slots[first], slots[second])
            elif count == 1:
                slots[target] = function(slots[first])
            elif count == 3:
                slots[target] = function(slots[first], slots[second], slots[third])
            else:
                slots[target] = function(*gather(slots))
            if released:
                for slot in released:
                    slots[slot] = None
        return slots[self._result]


_Step = tuple[_Function, int, int, int, int, int, _Function, tuple[int, ...]]


def _step(
    function: _Function, target: int, arguments: Sequence[int], released: tuple[int, ...]
) -> _Step:
    first, second, third = (*arguments, 0, 0, 0)[:3]
    gather = itemgetter(*arguments) if len(arguments) > 1 else lambda _: ()
    return function, target, len(arguments), first, second, third, gather, released


class _Call(NamedTuple):
    """A call of ``function``; values are numbers, each of which stands for one value alone."""

    function: _Function
    arguments: list[int]
    result: int


class _Calls:
    """The calls of a graph, in order, and the constants that they read."""

    def __init__(self, graph: fx.Graph) -> None:
        self.made: list[_Call] = []
        self.constants: dict[int, Any] = {}
        self.result = -1
        inputs = [node for node in graph.nodes if node.op == "placeholder"]
        self.num_inputs = self._count = len(inputs)
        self._values = {node: number for number, node in enumerate(inputs)}
        for node in graph.nodes:
            if node.op == "output":
                self.result = self._value(node.args[0])
            elif node.op in ("call_function", "call_method"):
                self._values[node] = self._call(*_resolve(node))
            elif node.op != "placeholder":
                raise CompileError(f"the graph embeds {node.target!r}; it cannot be run")

    def _call(self, function: _Function, arguments: Sequence[Any]) -> int:
        values = [self._value(argument) for argument in arguments]
        self.made.append(_Call(function, values, self._new()))
        return self._count - 1

    def _value(self, argument: Any) -> int:
        """The number of an argument; one that contains results is made of them by a call."""
        if isinstance(argument, fx.Node):
            return self._values[argument]
        if not _contains_node(argument):
            self.constants[self._new()] = _plain(argument)
            return self._count - 1
        if isinstance(argument, slice):
            return self._call(slice, (argument.start, argument.stop, argument.step))
        if isinstance(argument, tuple):
            return self._call(lambda *items: items, argument)
        return self._call(lambda *items: list(items), argument)

    def _new(self) -> int:
        self._count += 1
        return self._count - 1


def _get_slots(calls: _Calls) -> tuple[dict[int, int], list[tuple[int, ...]]]:
    """The slot of each value, and the slots that each call clears."""
    last = {value: place for place, call in enumerate(calls.made) for value in call.arguments}
    last[calls.result] = len(calls.made)
    slots = {value: value for value in range(calls.num_inputs)}
    slots |= {value: calls.num_inputs + n for n, value in enumerate(calls.constants)}
    kept, count = set(slots), len(slots)
    free: list[int] = []
    released: list[tuple[int, ...]] = []
    for place, call in enumerate(calls.made):
        dying = {x for x in call.arguments if last[x] == place and x not in kept}
        freed = sorted(slots[x] for x in dying)
        if freed:
            target = freed.pop()
        elif free:
            target = free.pop()
        else:
            target, count = count, count + 1
        slots[call.result] = target
        free += freed
        if call.result not in last:
            freed.append(target)
            free.append(target)
        released.append(tuple(freed))
    return slots, released


def _resolve(node: fx.Node) -> tuple[_Function, Sequence[Any]]:
    """The function that does what ``node`` does, and its arguments by position."""
    function: Any = node.target
    if node.op == "call_method":
        function = getattr(Tensor, str(node.target))
    elif isinstance(function, OpOverload):
        return _resolve_op(function, node)
    return _by_position(function, node.args, dict(node.kwargs))


def _resolve_op(op: OpOverload, node: fx.Node) -> tuple[_Function, Sequence[Any]]:
    """As ``_resolve``: what the schema names by position is passed by position."""
    arguments, keywords = list(node.args), dict(node.kwargs)
    places = [x.name for x in op._schema.arguments if not x.kwarg_only]
    for argument in op._schema.arguments[len(arguments) : len(places)]:
        if not keywords.keys() & set(places):
            break
        if argument.name not in keywords and not argument.has_default_value():
            break
        arguments.append(keywords.pop(argument.name, argument.default_value))
    # Without the frame of OpOverload.__call__, which does no more.
    return _by_position(op._op, arguments, keywords)


def _by_position(
    function: _Function, arguments: Sequence[Any], keywords: dict[str, Any]
) -> tuple[_Function, Sequence[Any]]:
    constants = {name: _plain(x) for name, x in keywords.items() if not _contains_node(x)}
    names = tuple(name for name in keywords if name not in constants)
    if constants:
        function = partial(function, **constants)
    if names:
        function = partial(_call_with_names, function, names)
    return function, [*arguments, *(keywords[name] for name in names)]


def _call_with_names(function: _Function, names: tuple[str, ...], *values: Any) -> Any:
    """Call ``function`` with the last values as keyword arguments of ``names``."""
    count = len(values) - len(names)
    return function(*values[:count], **dict(zip(names, values[count:], strict=True)))


def _contains_node(value: Any) -> bool:
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, list | tuple):
        return any(map(_contains_node, value))
    return isinstance(value, fx.Node)


def _plain(value: Any) -> Any:
    """A constant without fx's own kinds of sequences."""
    if isinstance(value, list | tuple):
        items = [_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) else items
    return value
