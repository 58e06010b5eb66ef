"""Applies the tables of `server.request.treatments` to a body."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from server.errors import UnsupportedFieldError, describe
from server.frontend import Endpoint, JsonObject
from server.request.treatments import TREATMENTS, Treated, Treatment

HEADER = "x-rbln-ignored-fields"
"""Of an answer: the fields that had no effect, by their paths."""
_ITEMS = "[]"


@dataclass(slots=True)
class _Node:
    """A place in a body: the rows about it, and the places within that have some."""

    rows: list[Treated] = field(default_factory=list)
    within: dict[str, _Node] = field(default_factory=dict)


def treat(endpoint: Endpoint, body: JsonObject) -> list[str]:
    """Take off `body` what is granted or ignored; return the paths of what is ignored.

    Raises `UnsupportedFieldError` for what is refused. The work is linear in the body's size.
    """
    ignored: set[str] = set()
    _visit(body, _tree(endpoint), "", ignored)
    return sorted(ignored)


@cache
def _tree(endpoint: Endpoint) -> _Node:
    root = _Node()
    for row in TREATMENTS[endpoint]:
        if row.treatment is Treatment.OBEYED:
            continue
        node = root
        for step in row.path.replace(_ITEMS, f".{_ITEMS}").split("."):
            node = node.within.setdefault(step, _Node())
        node.rows.append(row)
    return root


def _visit(value: Any, node: _Node, path: str, ignored: set[str]) -> None:
    if isinstance(value, list) and (items := node.within.get(_ITEMS)) is not None:
        value[:] = [
            item
            for index, item in enumerate(value)
            if _stays(item, items, f"{path}[{index}]", ignored)
        ]
    elif isinstance(value, dict):
        for name, below in node.within.items():
            place = f"{path}.{name}" if path else name
            if name in value and not _stays(value[name], below, place, ignored):
                del value[name]


def _stays(value: Any, node: _Node, path: str, ignored: set[str]) -> bool:
    """Whether a value stays in the body, once it is treated itself."""
    if _taken_off(value, node, path, ignored):
        return False
    if node.within:
        _visit(value, node, path, ignored)
    return True


def _taken_off(value: Any, node: _Node, path: str, ignored: set[str]) -> bool:
    """Whether a value is to leave the body; raises for one that is refused."""
    for row in node.rows:
        if row.when and not _has(value, row.when):
            continue
        if row.treatment is Treatment.GRANTED:
            return True
        passes = value is None or any(_equal(value, other) for other in row.same)
        if row.treatment is Treatment.REFUSED and not passes:
            raise UnsupportedFieldError(
                f"'{path}' is not supported, got {describe(value)}: {row.why}.", param=path
            )
        if row.treatment is Treatment.IGNORED and not passes:
            ignored.add(row.path)
        return not row.stays
    return False


def _has(value: Any, entries: Any) -> bool:
    return isinstance(value, dict) and all(
        name in value and _equal(value[name], wanted) for name, wanted in entries.items()
    )


def _equal(value: Any, other: Any) -> bool:
    # As JSON has them: 0 is not false.
    return type(value) is type(other) and bool(value == other)
