"""Attributes of instances of vLLM's classes, and their types.

Read from annotations and from assignments to `self` in methods, without an engine.
"""

from __future__ import annotations

import ast
import inspect
import sys
import types
import typing
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class _TypeHint:
    """Type information of an assignment: an annotation, and attributes from there."""

    annotation: str
    path: tuple[str, ...] = ()


def is_member(owner: type, name: str) -> bool:
    """Return True if a class of vLLM gives instances of `owner` this attribute."""
    return any(
        name in vars(base) or name in _annotations(base) or name in _assigned(base)
        for base in _upstream(owner)
    )


def type_of_member(owner: type, name: str) -> Any:
    """Return the class of an attribute of instances of `owner`, or None."""
    for base in _upstream(owner):
        found = vars(base).get(name)
        if isinstance(found, property):
            return _class_of(getattr(found.fget, "__annotations__", {}).get("return"), base)
        if name in _annotations(base):
            return _class_of(_annotations(base)[name], base)
        if hint := _assigned(base).get(name):
            return _follow(hint, base)
    return None


def reads(owner: type, name: str) -> Mapping[str, int]:
    """Return the number of reads of an attribute of `self` by method of vLLM's classes."""
    found: Counter[str] = Counter()
    for base in _upstream(owner):
        for function in ast.walk(_tree(base)):
            if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                loads = (node for node in ast.walk(function) if _is_read(node, name))
                found.update({function.name: sum(1 for _ in loads)})
    return +found


def _is_read(node: ast.AST, name: str) -> bool:
    match node:
        case ast.Attribute(ast.Name("self"), attr, ast.Load()):
            return attr == name
    return False


@cache
def _tree(owner: type) -> ast.AST:
    # Of a class, `inspect` would parse the whole module each time.
    tree: ast.AST = _module_tree(sys.modules[owner.__module__])
    for name in owner.__qualname__.split("."):
        inside = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
        tree = next((node for node in inside if node.name == name), ast.Module([], []))
    return tree


@cache
def _module_tree(module: types.ModuleType) -> ast.Module:
    try:
        return ast.parse(inspect.getsource(module))
    except (OSError, TypeError):
        return ast.Module([], [])


def _upstream(owner: type) -> list[type]:
    return [base for base in owner.__mro__ if f"{base.__module__}.".startswith("vllm.")]


def _annotations(owner: type) -> Mapping[str, Any]:
    found: Mapping[str, Any] = vars(owner).get("__annotations__", {})
    return found


def _follow(hint: _TypeHint, owner: type) -> Any:
    found = _class_of(hint.annotation, owner) if hint.annotation else owner
    for name in hint.path:
        found = type_of_member(found, name) if isinstance(found, type) else None
    return found


def _class_of(annotation: Any, owner: type) -> Any:
    """Return the class of an annotation in the module of `owner`."""
    module = sys.modules[owner.__module__]
    holder = type("Holder", (), {"__annotations__": {"it": annotation}})
    try:
        resolved = typing.get_type_hints(holder, vars(module), _Imports(module))["it"]
    except (NameError, TypeError, AttributeError, SyntaxError, ImportError):
        return None
    alternatives = typing.get_args(resolved) if _is_union(resolved) else (resolved,)
    classes = [one for one in alternatives if isinstance(one, type) and one is not type(None)]
    return classes[0] if classes else None


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)


class _Imports(dict[str, Any]):
    """Names that a module imports for type checkers only."""

    def __init__(self, module: types.ModuleType) -> None:
        super().__init__()
        self._sources = _imports(module)

    def __missing__(self, name: str) -> Any:
        if name not in self._sources:
            raise KeyError(name)
        module, original = self._sources[name]
        return getattr(sys.modules.get(module) or __import__(module, fromlist=["_"]), original)


@cache
def _imports(module: types.ModuleType) -> dict[str, tuple[str, str]]:
    return {
        alias.asname or alias.name: (node.module, alias.name)
        for node in ast.walk(_module_tree(module))
        if isinstance(node, ast.ImportFrom) and node.module and not node.level
        for alias in node.names
    }


@cache
def _assigned(owner: type) -> dict[str, _TypeHint | None]:
    """Return the attributes that the methods of a class assign to `self`."""
    found: dict[str, _TypeHint | None] = {}
    for function in ast.walk(_tree(owner)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            taken = {a.arg: ast.unparse(a.annotation) for a in function.args.args if a.annotation}
            for node in ast.walk(function):
                for name, hint in _hint_by(node, taken):
                    found[name] = found.get(name) or hint
    return found


def _hint_by(node: ast.AST, taken: Mapping[str, str]) -> Iterator[tuple[str, _TypeHint | None]]:
    if isinstance(node, ast.AnnAssign):
        yield from ((name, _TypeHint(ast.unparse(node.annotation))) for name in _own(node.target))
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Tuple):
                yield from ((name, None) for one in target.elts for name in _own(one))
            else:
                yield from ((name, _type_of_value(node.value, taken)) for name in _own(target))


def _own(target: ast.expr) -> Iterator[str]:
    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
        yield target.attr


def _type_of_value(value: ast.expr, taken: Mapping[str, str]) -> _TypeHint | None:
    """Return the hint of a constructor's name, or of a parameter and its attributes."""
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Name):
        return _TypeHint(value.func.id) if value.func.id[:1].isupper() else None
    first, *rest = ast.unparse(value).split(".")
    if first == "self" and rest:
        return _TypeHint("", tuple(rest))
    return _TypeHint(taken[first], tuple(rest)) if first in taken else None
