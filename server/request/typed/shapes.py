"""Fields that objects nested in a request may have, from the annotations of its model.

pydantic accepts and drops unknown fields of vLLM's models and of OpenAI's `TypedDict`s. A shape
lists the fields of every form that an object may have; `type` and `role` select the form.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from typing_extensions import get_type_hints, is_typeddict

from server.request.fields.rules import UnknownPolicy, refuse_unknown, unknown_field

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

    def fits(self, value: Mapping[str, Any]) -> bool:
        """Return whether the tags of an object allow this form."""
        return all(
            not isinstance(given := value.get(tag), str) or given in allowed
            for tag, allowed in self.tags.items()
        )


@dataclasses.dataclass(slots=True)
class Shape:
    """Allowed values: an object of one of `forms`, or a list of values of the shape `items`.

    `free` allows objects with any fields.
    """

    forms: list[ObjectForm] = dataclasses.field(default_factory=list)
    items: Shape | None = None
    free: bool = False


@cache
def shapes_of(model: type[BaseModel]) -> dict[str, Shape]:
    """Return the shapes of those fields of a request model that hold nested objects."""
    found = {name: shape_of(annotation) for name, annotation in _model_fields(model).items()}
    return {name: shape for name, shape in found.items() if _has_forms(shape)}


@cache
def shape_of(annotation: Any) -> Shape:
    """Return the shape of a value with an annotation."""
    shape = Shape()
    inner: list[Any] = []
    for part in _alternatives(annotation):
        origin = get_origin(part)
        if is_typeddict(part):
            shape.forms.append(_form(_hints(part)))
        elif isinstance(part, type) and issubclass(part, BaseModel):
            shape.forms.append(_form(_model_fields(part)))
        elif isinstance(part, type) and dataclasses.is_dataclass(part):
            hints, made = _hints(part), [f.name for f in dataclasses.fields(part) if f.init]
            shape.forms.append(_form({name: hints[name] for name in made}))
        elif part in (Any, object, dict) or origin in (dict, Mapping):
            shape.free = True
        elif origin in (list, Iterable, Sequence, typing.Iterable):
            inner += get_args(part)
    if inner:
        shape.items = shape_of(typing.Union[tuple(inner)])  # noqa: UP007 (made of a list)
    return shape


def check_shape(shape: Shape, value: object, path: str, policy: UnknownPolicy) -> list[str]:
    """Raise `UnknownFieldError` for a field that no form of its object has; values are not checked.

    Returns the places of such fields that are null, which is as absent, and takes them out. The
    work is linear in the size of the value.
    """
    unset: list[str] = []
    _check_value(shape, value, path, policy, unset)
    return unset


def _check_value(
    shape: Shape, value: object, path: str, policy: UnknownPolicy, unset: list[str]
) -> None:
    if isinstance(value, list) and shape.items is not None:
        for index, item in enumerate(value):
            _check_value(shape.items, item, f"{path}[{index}]", policy, unset)
    elif isinstance(value, dict) and not shape.free:
        forms = [form for form in shape.forms if form.fits(value)]
        if forms:
            _check_object(forms, value, path, policy, unset)


def _check_object(
    forms: Sequence[ObjectForm],
    value: dict[str, Any],
    path: str,
    policy: UnknownPolicy,
    unset: list[str],
) -> None:
    for name, inner in list(value.items()):
        annotations = [form.fields[name] for form in forms if name in form.fields]
        place = f"{path}.{name}"
        if not annotations and inner is None:
            unset.append(place)
            del value[name]
        elif not annotations:
            known = {known for form in forms for known in form.fields}
            refuse_unknown(unknown_field(place, known), policy)
        elif isinstance(inner, list | dict):
            _check_value(_union(tuple(annotations)), inner, place, policy, unset)


@cache
def _union(annotations: tuple[Any, ...]) -> Shape:
    return shape_of(typing.Union[annotations])  # noqa: UP007 (made of a tuple)


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
