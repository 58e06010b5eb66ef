"""The check of a stored program's calls: by schema where torch has one, else by kind.

Python callables of torch parse their own arguments and have no schema. Torch checks them when a
start runs the program over tensors without memory (``programs.shapes``); here is refused what that
run itself must not meet.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._C import FunctionSchema

MAX_ELEMENTS = 1 << 31
"""Of a tensor that is made of numbers alone."""

_RANGE = "torch.arange"
_MAKERS = frozenset(
    (
        f"{_RANGE} torch.empty torch.full torch.ones torch.zeros method.new_empty "
        "method.new_full method.new_ones method.new_zeros"
    ).split()
)
_INDEXING = ("operator.getitem", "operator.setitem")
_OPERANDS = {"operator.neg": 1, "operator.invert": 1, "operator.setitem": 3}
_KEYWORD = re.compile(r"_?[a-z][a-z0-9_]{0,31}")
_NUMBERS = (bool, int, float)


@dataclass(frozen=True, slots=True)
class Reference:
    """The result of an earlier node, as an argument."""

    node: int


_TYPES: Mapping[str, tuple[type, ...]] = {
    "Tensor": (Reference,),
    "List[Tensor]": (Reference,),
    "int": (int,),
    "SymInt": (int,),
    "float": (int, float),
    "bool": (bool,),
    "number": _NUMBERS,
    "str": (str,),
    "ScalarType": (torch.dtype,),
    "Device": (torch.device,),
    "MemoryFormat": (torch.memory_format,),
}


def schema_mismatch(
    schema: FunctionSchema, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> str | None:
    """Why an op of ``schema`` cannot be called so, None where it can."""
    positional = [x for x in schema.arguments if not x.kwarg_only]
    if len(arguments) > len(positional):
        return f"takes {len(positional)} arguments by position, got {len(arguments)}"
    given = {x.name: value for x, value in zip(positional, arguments, strict=False)}
    for name, value in keywords.items():
        if name in given:
            return f"takes {name} once"
        given[name] = value
    unknown = given.keys() - {x.name for x in schema.arguments}
    if unknown:
        return f"has no argument {min(unknown)!r:.256}"
    for argument in schema.arguments:
        wanted = str(argument.real_type)
        if argument.name not in given:
            if not argument.has_default_value():
                return f"needs {argument.name}"
        elif not _has_type(given[argument.name], wanted):
            return f"takes {wanted} as {argument.name}, got {given[argument.name]!r:.256}"
    return None


def callable_mismatch(
    name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> str | None:
    """Why the Python callable ``name`` must not be called so, None where it may."""
    for keyword in keywords:
        # The result would be written over another tensor, whose memory may move.
        if keyword == "out" or not _KEYWORD.fullmatch(keyword):
            return f"has no argument {keyword!r:.256}"
    values = [*arguments, *keywords.values()]
    if any(isinstance(value, str) and _is_device(value) for value in values):
        return "takes a device as such, got its name"
    if name in _MAKERS:
        return _size_mismatch(name, arguments, keywords)
    if not any(map(_has_reference, values)):
        return "takes the result of a node, got none"
    if name.startswith("operator."):
        return _operator_mismatch(name, arguments, keywords)
    return None


def _operator_mismatch(
    name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]
) -> str | None:
    count = _OPERANDS.get(name, 2)
    if keywords or len(arguments) != count:
        return f"takes {count} operands, got {len(arguments) + len(keywords)}"
    # Python's operators repeat texts and sequences, and format texts.
    operands = arguments[: 1 if name in _INDEXING else None]
    if not all(map(_is_operand, operands)):
        return "takes results of nodes and numbers alone"
    return None


def _size_mismatch(name: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> str | None:
    """Bound the tensors that a program makes of numbers alone."""
    shapes = [x for x in (*arguments, keywords.get("size")) if isinstance(x, list | tuple)]
    given = shapes[0] if shapes else [*arguments, *keywords.values()]
    numbers = [abs(x) for x in given if type(x) in (int, float)]
    elements = max(numbers, default=0) if name == _RANGE else math.prod(numbers)
    if elements <= MAX_ELEMENTS:
        return None
    return f"makes {elements} elements; at most {MAX_ELEMENTS} are allowed"


def _has_type(value: Any, wanted: str) -> bool:
    """Return True if ``value`` has a type of a schema, as torch writes it."""
    if type(value) in _TYPES.get(wanted, ()):
        return True
    if wanted.startswith("Optional["):
        return value is None or _has_type(value, wanted[len("Optional[") : -1])
    if wanted.startswith("List[") and isinstance(value, list | tuple):
        return all(_has_type(item, wanted[len("List[") : -1]) for item in value)
    return False


def _has_reference(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_has_reference, value))
    return isinstance(value, Reference)


def _is_operand(value: Any) -> bool:
    return isinstance(value, Reference) or type(value) in _NUMBERS


def _is_device(text: str) -> bool:
    try:
        torch.device(text)
    except RuntimeError:
        return False
    return True
