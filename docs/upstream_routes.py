"""Routes of `vllm serve` that this server lacks, from the syntax trees of the installed vLLM."""

from __future__ import annotations

import ast
from collections.abc import Collection
from importlib.util import find_spec
from pathlib import Path

_METHODS = {"get", "post", "put", "delete", "websocket"}


def absent_routes(served: Collection[str]) -> list[str]:
    """Return vLLM's paths that are not in `served`, sorted. Nothing of vLLM is imported."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    paths = set()
    for file in (Path(spec.origin).parent / "entrypoints").rglob("*.py"):
        text = file.read_text(encoding="utf-8")
        if "router." in text or "app." in text:
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    paths |= {path for call in node.decorator_list if (path := _path(call))}
    return sorted(paths - set(served))


def _path(call: ast.expr) -> str | None:
    """Return the path of a decorator such as `router.post("/x")`."""
    match call:
        case ast.Call(
            func=ast.Attribute(attr=method), args=[ast.Constant(value=str(path)), *_]
        ) if method in _METHODS:
            return path
    return None
