"""Argument names, types and results of the operators in stored programs.

A signature is written as text, ``sum(input, dim: int|ints|none =, *, dtype: dtype|none =)``, or
comes from the schema of a torch op. In text a parameter without a type is a tensor, ``=`` marks
one that may be left out, ``*name`` one whose sequence may be spread over the arguments, and
parameters after ``*`` are passed by name. ``-> tensors`` and the like say what a call returns.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import FunctionSchema

MAX_INTEGER = 2**63 - 1
MAX_TEXT = 256
MAX_ITEMS = 1 << 16

Kind = str | int
"""Kind of a value: ``tensor``, ``number``, ``nothing``, ``tensors`` (any number of them), or the
number of tensors in a tuple."""


@dataclass(frozen=True, slots=True)
class Reference:
    """The result of an earlier node, as an argument."""

    node: int
    kind: Kind


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter; ``types`` are names of ``_CHECKS``."""

    name: str
    types: tuple[str, ...]
    is_required: bool = True
    by_name: bool = False
    is_spread: bool = False

    def accepts(self, value: Any) -> bool:
        return any(_CHECKS[name](value) for name in self.types)


@dataclass(frozen=True, slots=True)
class Signature:
    """One way to call an operator."""

    parameters: tuple[Parameter, ...]
    returns: Kind = "tensor"

    def mismatch(self, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str | None:
        """Why the operator cannot be called so, None where it can."""
        positional = [x for x in self.parameters if not x.by_name]
        spread = next((i for i, x in enumerate(positional) if x.is_spread), None)
        if spread is not None and len(arguments) > spread and _is_spread(arguments[spread:]):
            arguments = (*arguments[:spread], tuple(arguments[spread:]))
        if len(arguments) > len(positional):
            return f"takes {len(positional)} arguments by position, got {len(arguments)}"
        given = {x.name: value for x, value in zip(positional, arguments, strict=False)}
        for name, value in keywords.items():
            name = _ALIASES.get(name, name)
            if name in given:
                return f"takes {name} once"
            given[name] = value
        return self._mismatch(given)

    def _mismatch(self, given: Mapping[str, Any]) -> str | None:
        unknown = given.keys() - {parameter.name for parameter in self.parameters}
        if unknown:
            return f"has no argument {min(unknown)[:MAX_TEXT]!r}"
        for parameter in self.parameters:
            if parameter.name not in given:
                if parameter.is_required:
                    return f"needs {parameter.name}"
            elif not parameter.accepts(given[parameter.name]):
                wanted, value = " or ".join(parameter.types), _described(given[parameter.name])
                return f"takes {wanted} as {parameter.name}, got {value}"
        return None


# As numpy calls them, which torch's functions accept.
_ALIASES = {"axis": "dim", "keepdims": "keepdim"}


def parse(text: str) -> tuple[str, Signature]:
    """The name and the signature of one line of text."""
    match = _LINE.fullmatch(text.strip())
    assert match is not None, text
    name, parameters, returns = match.groups()
    found, by_name = [], False
    for part in filter(None, (part.strip() for part in parameters.split(","))):
        if part == "*":
            by_name = True
        else:
            found.append(_parameter(part, by_name))
    kind = returns or "tensor"
    return name, Signature(tuple(found), int(kind) if kind.isdigit() else kind)


_LINE = re.compile(r"(\w+)\((.*)\)(?: -> (\w+))?")
_PARAMETER = re.compile(r"(\*?)(\w+)(?:: ([\w|]+))?( =)?")


def _parameter(text: str, by_name: bool) -> Parameter:
    match = _PARAMETER.fullmatch(text)
    assert match is not None, text
    star, name, types, default = match.groups()
    return Parameter(
        name, tuple((types or "tensor").split("|")), default is None, by_name, bool(star)
    )


def of_schema(schema: FunctionSchema) -> Signature:
    """The signature of a torch op; raises ``TypeError`` for a type that no program can hold."""
    parameters = tuple(
        Parameter(
            argument.name,
            _types_of_schema(
                str(argument.real_type), has_size=getattr(argument, "N", None) is not None
            ),
            is_required=not argument.has_default_value(),
            by_name=argument.kwarg_only,
        )
        for argument in schema.arguments
    )
    return Signature(parameters, _returned([str(value.type) for value in schema.returns]))


def _types_of_schema(name: str, *, has_size: bool) -> tuple[str, ...]:
    inner = re.fullmatch(r"Optional\[(.*)\]", name)
    if inner is not None:
        return (*_types_of_schema(inner[1], has_size=has_size), "none")
    if name not in _SCHEMA_TYPES:
        raise TypeError(f"arguments of type {name} are not supported")
    types = (_SCHEMA_TYPES[name],)
    return (*types, "int") if has_size and types == ("ints",) else types


_SCHEMA_TYPES = {
    "Tensor": "tensor",
    "List[Tensor]": "tensors",
    "int": "int",
    "SymInt": "int",
    "List[int]": "ints",
    "List[SymInt]": "ints",
    "float": "float",
    "bool": "bool",
    "number": "number",
    "str": "str",
    "ScalarType": "dtype",
    "Device": "device",
    "MemoryFormat": "memory_format",
}


def _returned(types: list[str]) -> Kind:
    if types == ["List[Tensor]"]:
        return "tensors"
    if not types:
        return "nothing"
    if any(name != "Tensor" for name in types):
        return "number"
    return "tensor" if len(types) == 1 else len(types)


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Reference) and value.kind == "tensor"


def _is_number_reference(value: Any) -> bool:
    return isinstance(value, Reference) and value.kind == "number"


def _is_int(value: Any) -> bool:
    return type(value) is int or _is_number_reference(value)


def _is_float(value: Any) -> bool:
    return type(value) in (int, float) or _is_number_reference(value)


def _is_sequence(value: Any, check: Callable[[Any], bool]) -> bool:
    return isinstance(value, list | tuple) and all(map(check, value))


def _is_tensors(value: Any) -> bool:
    if isinstance(value, Reference):
        return value.kind == "tensors" or isinstance(value.kind, int)
    return _is_sequence(value, _is_tensor)


def _is_index(value: Any) -> bool:
    """Parse the text between the brackets of a tensor type."""
    if isinstance(value, tuple):
        return all(map(_is_index_part, value))
    return _is_index_part(value)


def _is_index_part(value: Any) -> bool:
    if isinstance(value, slice):
        parts = (value.start, value.stop, value.step)
        return all(part is None or _is_int(part) for part in parts)
    is_constant = value is None or value is Ellipsis or isinstance(value, bool)
    return is_constant or _is_int(value) or _is_tensor(value) or _is_sequence(value, _is_int)


def _is_spread(arguments: Sequence[Any]) -> bool:
    """Return True if a sequence is passed as separate arguments."""
    return all(map(_is_int, arguments)) or (len(arguments) > 1 and all(map(_is_tensor, arguments)))


_CHECKS: Mapping[str, Callable[[Any], bool]] = {
    "tensor": _is_tensor,
    "tensors": _is_tensors,
    "int": _is_int,
    "ints": lambda value: _is_sequence(value, _is_int),
    "float": _is_float,
    "number": lambda value: isinstance(value, bool) or _is_float(value),
    "bool": lambda value: isinstance(value, bool),
    "str": lambda value: isinstance(value, str),
    "dtype": lambda value: isinstance(value, torch.dtype),
    "device": lambda value: isinstance(value, torch.device),
    "memory_format": lambda value: isinstance(value, torch.memory_format),
    "index": _is_index,
    "slice": lambda value: isinstance(value, slice) and _is_index_part(value),
    "none": lambda value: value is None,
}


def _described(value: Any) -> str:
    if isinstance(value, Reference):
        return f"the result of node {value.node} ({value.kind})"
    return f"{str(value)[:MAX_TEXT]!r} ({type(value).__name__})"
