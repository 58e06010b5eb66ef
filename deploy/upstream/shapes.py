"""The shape of a name in the installed vLLM, as one line to compare with another release."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import types
from collections.abc import Callable
from typing import Any

import msgspec
from pydantic import BaseModel

from deploy.upstream.typing_of import is_member, reads, type_of_member

_MISSING = object()
_ON_EVERY_CLASS = ("__init__", "__class__")
# Each release adds settings, off by default.
_SETTINGS = ("vllm.config.", "vllm.engine.arg_utils.")


class AbsentError(Exception):
    """A name does not exist, or its type is unknown."""


def shape(name: str) -> str:
    """Return the shape of `name`: `module`, `class`, `(self, request, raw_request=None)`.

    Raises `AbsentError`.
    """
    owner, member = _find(name)
    if member is None:
        return "module"
    if member == "__init__" and isinstance(owner, type):
        return _constructor(owner)
    return _shape(_value(owner, member))


def short(name: str) -> str:
    """Return the list's form of `name`: a member by its class only, without the module.

    `vllm.config.VllmConfig.cache_config.block_size` is `CacheConfig.block_size`.

    Raises `AbsentError`.
    """
    owner, member = _find(name)
    return f"{owner.__qualname__}.{member}" if isinstance(owner, type) else name


def signature(name: str) -> inspect.Signature | None:
    """Return a method's signature, or None if `name` is no method. Raises `AbsentError`."""
    owner, member = _find(name)
    found = _value(owner, member or "")
    function = found.__func__ if isinstance(found, staticmethod | classmethod) else found
    return inspect.signature(function) if inspect.isfunction(function) else None


def readers(name: str) -> str:
    """Return the methods of the class that read one of its attributes, with counts."""
    owner, member = _find(name)
    found = reads(owner, member or "")
    counts = (f"{method}:{count}" for method, count in sorted(found.items()))
    return f" read by {' '.join(counts)}" if found else ""


def _find(name: str) -> tuple[Any, str | None]:
    """Return the module or class that contains the last part of `name`, and that part."""
    module, rest = _module(name)
    owner: Any = module
    for index, part in enumerate(rest):
        if isinstance(owner, types.ModuleType):
            exists = hasattr(owner, part)
        else:
            exists = part in _ON_EVERY_CLASS or is_member(owner, part)
        if not exists:
            raise AbsentError(f"{owner.__name__} has no {part}")
        if index + 1 < len(rest):
            inner = getattr(owner, part) if owner is module else type_of_member(owner, part)
            if not isinstance(inner, type | types.ModuleType):
                raise AbsentError(f"the type of {part} in {name} is not known")
            owner = inner
    return owner, rest[-1] if rest else None


def _module(name: str) -> tuple[types.ModuleType, list[str]]:
    """Import the longest prefix of `name` that is a module; return it and the rest."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        path = ".".join(parts[:length])
        try:
            return importlib.import_module(path), parts[length:]
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise AbsentError(f"{path} cannot be imported: {error}") from error
        except ImportError as error:
            raise AbsentError(f"{path} cannot be imported: {error}") from error
    raise AbsentError(f"{parts[0]} is not installed")


def _value(owner: type | types.ModuleType, member: str) -> Any:
    if isinstance(owner, types.ModuleType):
        return getattr(owner, member, _MISSING)
    return inspect.getattr_static(owner, member, _MISSING)


def _shape(found: Any) -> str:
    if isinstance(found, type) and (fields := _fields(found)):
        settings = f"{found.__module__}.".startswith(_SETTINGS)
        return "settings" if settings else f"record of {', '.join(fields)}"
    if isinstance(found, enum.EnumMeta):
        return f"choice of {', '.join(found.__members__)}"
    if isinstance(found, classmethod | staticmethod):
        return f"{type(found).__name__} {_parameters(found.__func__)}"
    if inspect.isfunction(found):
        return _parameters(found)
    for kind, word in ((types.ModuleType, "module"), (type, "class"), (property, "property")):
        if isinstance(found, kind):
            return word
    return "attribute"


def _constructor(owner: type) -> str:
    """Return a constructor's parameters; of a record, only the required ones."""
    record = bool(_fields(owner)) or issubclass(owner, BaseModel)
    return _parameters(_without_new(owner), optional=not record)


def _without_new(owner: type) -> Callable[..., Any]:
    """Return `owner`, or a bound `__init__` that a base's `__new__` would hide.

    `inspect.signature` of Python 3.11.2 (Debian 12) prefers any `__new__`, later ones the method
    of the class that comes first.
    """
    first = next((c for c in owner.__mro__ if {"__init__", "__new__"} & vars(c).keys()), owner)
    if "__new__" in vars(first) or not any("__new__" in vars(c) for c in owner.__mro__[:-1]):
        return owner
    init: Any = vars(first)["__init__"]
    if not inspect.isfunction(init):
        return owner
    bound: Callable[..., Any] = init.__get__(owner)
    return bound


def _fields(found: type) -> tuple[str, ...]:
    """Return the fields of a record; unused fields may matter, too."""
    if issubclass(found, msgspec.Struct):
        return found.__struct_fields__
    if dataclasses.is_dataclass(found):
        return tuple(field.name for field in dataclasses.fields(found))
    return ()


def _parameters(function: Callable[..., Any], *, optional: bool = True) -> str:
    """Return a signature without annotations; defaults that are not plain values become `...`."""
    try:
        found = inspect.signature(function)
    except (TypeError, ValueError):
        return "(...)"
    shown = []
    for parameter in found.parameters.values():
        default = parameter.default
        if default is not parameter.empty and not optional:
            continue
        if default is not parameter.empty and not _is_plain(default):
            default = ...
        shown.append(parameter.replace(annotation=parameter.empty, default=default))
    return str(inspect.Signature(shown)).replace("Ellipsis", "...")


def _is_plain(value: object) -> bool:
    return value is None or type(value) in (bool, int, float, str)
