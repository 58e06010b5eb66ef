"""Rewriting of a schema: its grammar, and the parts that the grammar does not follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.structured_outputs.constraint import Undeclared, UnusableError
from server.structured_outputs.rewriting.containers.array_counts import count_steps
from server.structured_outputs.rewriting.document import Node, SchemaDocument
from server.structured_outputs.rewriting.drafts import draft_of, modern, newer_keywords
from server.structured_outputs.rewriting.nodes import Nodes
from server.structured_outputs.rewriting.rules import Rules
from server.structured_outputs.rewriting.shapes import Array, CountedArray, Object, Shape
from server.structured_outputs.schema_resources import localized

MAX_NODES = 4000
"""Most nodes of a schema."""


@dataclass(frozen=True, slots=True)
class Rewriting:
    """Grammar of a schema; `left_out` has a line for each part that it does not follow."""

    grammar: str
    left_out: tuple[str, ...]


def rewrite(schema: Any, *, compact: bool, undeclared: Undeclared = Undeclared.OMIT) -> Rewriting:
    """Return the grammar of a schema; `compact` for JSON without whitespace.

    Raises `UnusableError` if no value satisfies it, or if it has too many combinations.
    """
    return rewrite_localized(localized(schema), compact=compact, undeclared=undeclared)


def rewrite_localized(schema: Any, *, compact: bool, undeclared: Undeclared) -> Rewriting:
    """Return the grammar of a schema whose references are `localized`. Raises as `rewrite`."""
    rules = Rules(compact=compact)
    root, left_out = add_schema(rules, schema, undeclared)
    return Rewriting(rules.text(root), left_out)


def add_schema(rules: Rules, schema: Any, undeclared: Undeclared) -> tuple[str, tuple[str, ...]]:
    """Add the rules of a `localized` schema; return its root rule, and a line for each part that
    is not followed.

    Raises `UnusableError` as `rewrite` does.
    """
    document = SchemaDocument(modern(schema), draft=draft_of(schema), undeclared=undeclared)
    document.left_out += newer_keywords(schema)
    nodes = Nodes(document)
    root = Node.of(document.root)
    found = _reached(nodes, root)
    while root in (possible := _possible(found)):
        stem = rules.new_name("node")
        names = dict[Node, str]()
        written: list[Node] = []
        for index, node in enumerate(found):
            if node in possible:
                scalar = rules.scalar(found[node])
                names[node] = scalar or f"{stem}_{index}"
                written += [] if scalar else [node]
        empty = [node for node in written if not _define(rules, found[node], node, names)]
        if not empty:
            return names[root], tuple(document.left_out)
        # A rule without options would be of the empty text.
        found |= dict.fromkeys(empty, ())
    raise UnusableError("$: no value satisfies it")


def _define(rules: Rules, shapes: tuple[Shape, ...], node: Node, names: Mapping[Node, str]) -> bool:
    """Add the rule of a node; return False if it has no options."""
    options = [option for shape in shapes for option in rules.of_shape(shape, names.get)]
    if options:
        rules.define(names[node], *dict.fromkeys(options))
    return bool(options)


def _reached(nodes: Nodes, root: Node) -> dict[Node, tuple[Shape, ...]]:
    """Return the shapes of the root and of all nodes reachable from it."""
    found: dict[Node, tuple[Shape, ...]] = {}
    waiting = [root]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        if len(found) >= MAX_NODES:
            raise UnusableError(
                f"it has more than {MAX_NODES} different places of values, the limit of this server"
            )
        found[node] = nodes.shapes(node)
        waiting += [part for shape in found[node] for part in _parts(shape)]
    return found


def _parts(shape: Shape) -> list[Node]:
    if isinstance(shape, Object):
        pairs = [node for pair in shape.others for node in pair]
        return [*(item.node for item in shape.properties), *pairs, *(shape.last or ())]
    if isinstance(shape, Array):
        rest = [shape.rest] if shape.rest is not None else []
        return [*shape.first, *rest]
    if isinstance(shape, CountedArray):
        return [option.node for options in (*shape.first, shape.rest) for option in options]
    return []


def _possible(found: dict[Node, tuple[Shape, ...]]) -> set[Node]:
    """Return the nodes that a finite value satisfies."""
    possible: set[Node] = set()
    grown = True
    while grown:
        grown = False
        # Parts were found after the values that they are of.
        for node, shapes in reversed(found.items()):
            if node not in possible and any(_is_possible(shape, possible) for shape in shapes):
                possible.add(node)
                grown = True
    return possible


def _is_possible(shape: Shape, possible: set[Node]) -> bool:
    if isinstance(shape, Object):
        return _is_possible_object(shape, possible)
    if isinstance(shape, Array):
        return _is_possible_array(shape, possible)
    if isinstance(shape, CountedArray):
        steps = count_steps(shape, possible.__contains__)
        return (0,) * (1 + len(shape.contained)) in steps
    return True


def _is_possible_object(shape: Object, possible: set[Node]) -> bool:
    have = [item for item in shape.properties if item.node in possible]
    needed = sum(item.required for item in shape.properties)
    if sum(item.required for item in have) < needed:
        return False
    if shape.last is not None and not possible.issuperset(shape.last):
        return False
    others = any(name in possible and value in possible for name, value in shape.others)
    most = len(have) + others
    return shape.least <= (most if shape.most is None else min(most, shape.most)) and (
        shape.most is None or needed <= shape.most
    )


def _is_possible_array(shape: Array, possible: set[Node]) -> bool:
    if shape.chosen is not None:
        return shape.least <= len(shape.chosen)
    needed = list(shape.first[: shape.least])
    if shape.least > len(shape.first):
        if shape.rest is None:
            return False
        needed.append(shape.rest)
    return all(node in possible for node in needed)
