"""Apply the field rules to a body, and reject unknown fields by name.

vLLM's request models ignore unknown fields, and those within objects too: pydantic accepts and
drops them of vLLM's models and of OpenAI's `TypedDict`s. A shape lists the fields of every form
that an object may have; `type` and `role` select the form. Pure functions over plain bodies.
"""

from __future__ import annotations

import dataclasses
import difflib
import logging
import types
import typing
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError
from typing_extensions import get_type_hints, is_typeddict

from server.errors import (
    InvalidTypeError,
    InvalidValueError,
    MissingFieldError,
    UnknownFieldError,
    UnsupportedFieldError,
    describe,
)
from server.request.tables import FIELDS, Field, FieldAction, fields_by_name
from server.wire import Endpoint, JsonObject

logger = logging.getLogger(__name__)

UnknownPolicy = Literal["reject", "warn"]

_LONGEST_NAME = 64
"""Longest unknown name for which a similar field is suggested."""
_UNKNOWN_FLAG = "with --unknown-fields warn this server ignores unknown fields"
"""Hint at the end of every error about an unknown field."""
_REPLACED: Mapping[str, str] = {"best_of": "n", "normalize": "use_activation"}
"""Fields of older vLLM versions, and their replacements."""
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
    documented = {*known, *_tree(endpoint).within}
    accepted: JsonObject = {}
    ignored = []
    for name, value in body.items():
        if name in known:
            if value is not None or name in required:
                accepted[name] = value
        elif value is None:
            ignored.append(name)
        else:
            refuse_unknown(unknown_field(name, documented), policy)
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
    return accepted, ignored


def known_fields(
    body: Mapping[str, Any], known: Collection[str], policy: UnknownPolicy
) -> JsonObject:
    fields: JsonObject = {}
    for name, value in body.items():
        if name in known:
            fields[name] = value
        else:
            refuse_unknown(unknown_field(name, known), policy)
    return fields


def unknown_field(path: str, known: Collection[str]) -> UnknownFieldError:
    """Return the error for an unknown field, with the likely remedy."""
    name = path.rpartition(".")[2]
    if name in _REPLACED:
        message = f"The field '{path}' is not supported any more; send {_REPLACED[name]} instead"
        return UnknownFieldError(f"{message} ({_UNKNOWN_FLAG}).", param=path)
    near = difflib.get_close_matches(name, known, n=1) if len(name) <= _LONGEST_NAME else []
    hint = f"; did you mean '{near[0]}'?" if near else ""
    shown = path if len(path) <= 200 else f"{path[:200]}..."
    return UnknownFieldError(f"Unknown field '{shown}'{hint} ({_UNKNOWN_FLAG}).", param=path)


@cache
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


def _visit(value: Any, node: _Node, path: str, ignored: set[str]) -> bool:
    """Apply the rules to a value and to what it holds; return True if it stays in the body."""
    if node.rows and _is_removed(value, node, path, ignored):
        return False
    if isinstance(value, list) and (items := node.within.get(_ITEMS)) is not None:
        value[:] = [
            item
            for index, item in enumerate(value)
            if _visit(item, items, f"{path}[{index}]", ignored)
        ]
    elif isinstance(value, dict):
        for name, below in node.within.items():
            if name in value and not _visit(
                value[name], below, f"{path}.{name}" if path else name, ignored
            ):
                del value[name]
    return True


def _is_removed(value: Any, node: _Node, path: str, ignored: set[str]) -> bool:
    """Return True if the rules remove a value; raises for a refused one."""
    for row in node.rows:
        if row.when and not isinstance(value, dict):
            continue
        if not all(name in value and _equal(value[name], it) for name, it in row.when.items()):
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


def _equal(value: Any, other: Any) -> bool:
    # As in JSON: 0 is not false.
    return type(value) is type(other) and bool(value == other)


# Fields within objects, from the annotations of their models.

_TAGS = ("type", "role")
"""Fields that select the form of an object."""
_OF_RETURNED_ITEMS = ("id", "status")
"""Fields of messages as this server and OpenAI's return them, for `input` to have them again."""
_ENGINES_OWN = "openai_harmony"
"""Module of message types that vLLM makes itself."""


@dataclasses.dataclass(frozen=True, slots=True)
class ObjectForm:
    """One form of an object: its fields, and the values of those tags that are fixed."""

    fields: Mapping[str, Any]
    tags: Mapping[str, frozenset[str]]


@dataclasses.dataclass(slots=True)
class Shape:
    """Allowed values: an object of one of `forms`, or a list of values of the shape `items`.

    `free` allows objects with any fields.
    """

    forms: list[ObjectForm] = dataclasses.field(default_factory=list)
    items: Shape | None = None
    free: bool = False


@cache
def get_shapes(model: type[BaseModel]) -> dict[str, Shape]:
    """Return the shapes of those fields of a request model that hold nested objects."""
    shapes = {
        name: get_field_shape(annotation) for name, annotation in _model_fields(model).items()
    }
    return {name: shape for name, shape in shapes.items() if _has_forms(shape)}


@cache
def get_field_shape(annotation: Any) -> Shape:
    shape = Shape()
    inner: list[Any] = []
    for part in _alternatives(annotation):
        origin = get_origin(part)
        if is_typeddict(part):
            shape.forms.append(_form(_hints(part)))
        elif isinstance(part, type) and issubclass(part, BaseModel):
            shape.forms.append(_form(_model_fields(part)))
        elif isinstance(part, type) and dataclasses.is_dataclass(part):
            hints = _hints(part)
            names = [field.name for field in dataclasses.fields(part) if field.init]
            shape.forms.append(_form({name: hints[name] for name in names}))
        elif part in (Any, object, dict) or origin in (dict, Mapping):
            shape.free = True
        elif origin in (list, Iterable, Sequence, typing.Iterable):
            inner += get_args(part)
    if inner:
        shape.items = get_field_shape(typing.Union[tuple(inner)])  # noqa: UP007 (made of a list)
    return shape


def check_shape(shape: Shape, value: object, path: str, policy: UnknownPolicy) -> list[str]:
    """Raise `UnknownFieldError` for a field that no form of its object has; values are not checked.

    Returns the places of such fields that are null, which is as absent, and takes them out. The
    work is linear in the size of the value.
    """
    unset: list[str] = []
    if isinstance(value, list) and shape.items is not None:
        for index, item in enumerate(value):
            unset += check_shape(shape.items, item, f"{path}[{index}]", policy)
    if not isinstance(value, dict) or shape.free:
        return unset
    forms = [
        form
        for form in shape.forms
        if all(
            not isinstance(tag := value.get(name), str) or tag in allowed
            for name, allowed in form.tags.items()
        )
    ]
    for name, inner in list(value.items()) if forms else ():
        annotations = [form.fields[name] for form in forms if name in form.fields]
        field = f"{path}.{name}"
        if not annotations and inner is None:
            unset.append(field)
            del value[name]
        elif not annotations:
            known = {known for form in forms for known in form.fields}
            refuse_unknown(unknown_field(field, known), policy)
        elif isinstance(inner, list | dict):
            unset += check_shape(_union(tuple(annotations)), inner, field, policy)
    return unset


@cache
def _union(annotations: tuple[Any, ...]) -> Shape:
    return get_field_shape(typing.Union[annotations])  # noqa: UP007 (made of a tuple)


def _has_forms(shape: Shape) -> bool:
    return bool(shape.forms) or (shape.items is not None and _has_forms(shape.items))


def _form(fields: Mapping[str, Any]) -> ObjectForm:
    tags = {tag: _literals(fields[tag]) for tag in _TAGS if tag in fields}
    if tags.get("type") == frozenset(("message",)):
        fields = {**dict.fromkeys(_OF_RETURNED_ITEMS, str | None), **fields}
    return ObjectForm(fields, {tag: values for tag, values in tags.items() if values})


def _literals(annotation: Any) -> frozenset[str]:
    """Return the values that a tag may have; empty for any text."""
    parts = list(_alternatives(annotation))
    if not all(get_origin(part) is Literal or part is type(None) for part in parts):
        return frozenset()
    return frozenset(value for part in parts for value in get_args(part))


def _model_fields(model: type[BaseModel]) -> dict[str, Any]:
    """Return a model's annotations by the names that a body may use."""
    fields = {name: info.annotation for name, info in model.model_fields.items()}
    aliases = {i.alias: i.annotation for i in model.model_fields.values() if i.alias is not None}
    return fields | aliases


def _hints(typed: Any) -> dict[str, Any]:
    return dict(get_type_hints(typed, include_extras=True))


def _alternatives(annotation: Any) -> Iterator[Any]:
    """Yield the members of a union, nested unions included, without `Annotated` and the like."""
    origin = get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        for part in get_args(annotation):
            yield from _alternatives(part)
    elif origin in (typing.Annotated, typing.Required, typing.NotRequired):
        yield from _alternatives(get_args(annotation)[0])
    elif not getattr(annotation, "__module__", "").startswith(_ENGINES_OWN):
        yield annotation


Body = TypeVar("Body", bound=BaseModel)


def parse_body(model: type[Body], body: JsonObject, unknown_fields: UnknownPolicy) -> Body:
    """Return the body as a model; raises `RequestError` for the first invalid field."""
    known = known_fields(body, model.model_fields, unknown_fields)
    try:
        return model.model_validate(known, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        if problem["type"] == "missing":
            raise MissingFieldError(f"The field '{name}' is missing.", param=name) from None
        raise InvalidTypeError(
            f"Invalid type for '{name}': {problem['msg']}, got {describe(problem['input'])}.",
            param=name,
        ) from None
