"""Apply the field rules to a body, and reject unknown fields by name.

vLLM's request models ignore unknown fields. Pure functions over plain bodies.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
from collections.abc import Collection, Mapping
from functools import cache
from typing import Any, Literal

from pydantic import BaseModel

from server.errors import InvalidValueError, UnknownFieldError, UnsupportedFieldError, describe
from server.request.fields.field import Field, FieldAction
from server.request.fields.lookup import fields_by_name
from server.request.fields.shared import REPLACED
from server.request.fields.tables import FIELDS
from server.wire.endpoint import Endpoint, JsonObject

logger = logging.getLogger(__name__)

UnknownPolicy = Literal["reject", "warn"]

_LONGEST_NAME = 64
"""Longest unknown name for which a similar field is suggested."""
_UNKNOWN_FLAG = "with --unknown-fields warn this server ignores unknown fields"
"""Hint at the end of every error about an unknown field."""
IGNORED_HEADER = "x-rbln-ignored-fields"
"""Header of an answer with the paths of the fields without effect."""
_ITEMS = "[]"


@dataclasses.dataclass(slots=True)
class _Node:
    """A place in a body: its rules, and the places within it that have rules."""

    rows: list[Field] = dataclasses.field(default_factory=list)
    within: dict[str, _Node] = dataclasses.field(default_factory=dict)


def apply_field_rules(endpoint: Endpoint, body: JsonObject) -> list[str]:
    """Remove granted and ignored fields from `body`; return the paths of the ignored ones.

    Raises `UnsupportedFieldError` for a refused field. The work is linear in the body's size.
    """
    ignored: set[str] = set()
    _visit(body, _tree(endpoint), "", ignored)
    return sorted(ignored)


def accepted_fields(
    body: JsonObject,
    known: Collection[str],
    required: Collection[str],
    policy: UnknownPolicy,
    endpoint: Endpoint,
) -> tuple[JsonObject, list[str]]:
    """Return the fields of a body that the model has, `known`, after `apply_field_rules`.

    Null is as absent, but for `required` fields: vLLM's models have other meanings of it. Also
    returns the names of unknown fields that are null, which are ignored. The suggestion for a
    misspelt name may be any documented field.
    Raises `UnknownFieldError`, `UnsupportedFieldError` or `InvalidValueError`.
    """
    meant = {*known, *_tree(endpoint).within}
    accepted: JsonObject = {}
    ignored = []
    for name, value in body.items():
        if name in known:
            if value is not None or name in required:
                accepted[name] = value
        elif value is None:
            ignored.append(name)
        else:
            refuse_unknown(unknown_field(name, meant), policy)
    _check_needs(endpoint, body)
    return accepted, ignored


def known_fields(
    body: Mapping[str, Any], known: Collection[str], policy: UnknownPolicy
) -> JsonObject:
    """Return the fields of a body that are known. Raises `UnknownFieldError` for another."""
    kept: JsonObject = {}
    for name, value in body.items():
        if name in known:
            kept[name] = value
        else:
            refuse_unknown(unknown_field(name, known), policy)
    return kept


def unknown_field(path: str, known: Collection[str]) -> UnknownFieldError:
    """Return the error for an unknown field, with the likely remedy."""
    name = path.rpartition(".")[2]
    if name in REPLACED:
        message = f"The field '{path}' is not supported any more; send {REPLACED[name]} instead"
        return UnknownFieldError(f"{message} ({_UNKNOWN_FLAG}).", param=path)
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= _LONGEST_NAME else []
    hint = f"; did you mean '{near[0]}'?" if near else ""
    shown = path if len(path) <= 200 else f"{path[:200]}..."
    return UnknownFieldError(f"Unknown field '{shown}'{hint} ({_UNKNOWN_FLAG}).", param=path)


def model_field_names(model: type[BaseModel]) -> dict[str, str]:
    """Return the names under which a body may give the model's fields, by attribute."""
    names: dict[str, str] = {}
    for name, field in model.model_fields.items():
        names[name] = name
        if field.alias is not None:
            names[field.alias] = name
    return names


@cache
def required_field_names(model: type[BaseModel]) -> frozenset[str]:
    """Return the names under which a body must give fields of the model."""
    fields, names = model.model_fields, model_field_names(model)
    return frozenset(name for name, key in names.items() if fields[key].is_required())


def _check_needs(endpoint: Endpoint, body: JsonObject) -> None:
    for name, row in fields_by_name(endpoint).items():
        if not row.needs or body.get(row.needs) or body.get(name) in (None, *row.idle):
            continue
        if row.needs == "stream":
            raise InvalidValueError(
                f"'{name}' needs 'stream': true, got {describe(body.get('stream'))}.", param=name
            )
        raise UnsupportedFieldError(
            f"'{name}' has an effect with '{row.needs}': true alone.", param=name
        )


def refuse_unknown(error: UnknownFieldError, policy: UnknownPolicy) -> None:
    """Raise `error`, or log it where the server ignores unknown fields."""
    if policy == "reject":
        raise error
    logger.warning("Ignored: %s", error.message)


@cache
def _tree(endpoint: Endpoint) -> _Node:
    root = _Node()
    for row in FIELDS[endpoint]:
        if row.action in (None, FieldAction.OBEYED):
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
    """Apply the rules to a value; return True if it stays in the body."""
    if _is_removed(value, node, path, ignored):
        return False
    if node.within:
        _visit(value, node, path, ignored)
    return True


def _is_removed(value: Any, node: _Node, path: str, ignored: set[str]) -> bool:
    """Return True if the rules remove a value; raises for a refused one."""
    for row in node.rows:
        if row.when and not _has(value, row.when):
            continue
        if row.only and not any(_equal(value, other) for other in row.only):
            continue
        if row.action is FieldAction.GRANTED:
            return True
        passes = value is None or any(_equal(value, other) for other in row.same)
        if row.action is FieldAction.REFUSED and not passes:
            raise UnsupportedFieldError(
                f"'{path}' is not supported, got {describe(value)}: {row.why}.",
                param=path,
                anthropic_code=row.code,
            )
        if row.action is FieldAction.IGNORED and not passes:
            ignored.add(row.path)
        return not row.stays
    return False


def _has(value: Any, entries: Any) -> bool:
    return isinstance(value, dict) and all(
        name in value and _equal(value[name], wanted) for name, wanted in entries.items()
    )


def _equal(value: Any, other: Any) -> bool:
    # As in JSON: 0 is not false.
    return type(value) is type(other) and bool(value == other)
