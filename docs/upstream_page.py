"""Rows of docs/vllm_serve.md: the routes and flags of `vllm serve` that this server lacks.

Routes are read from the syntax trees of the installed vLLM; nothing of it is imported.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path

from server.request.endpoints import ROUTES
from server.vllm.flag_table import (
    CHECKED_FLAGS,
    FULFILLED_FLAGS,
    HONOURED_FLAGS,
    REFUSED_FLAGS,
    RENAMED_FLAGS,
)

INTRODUCTION = (
    "Replace `vllm serve MODEL` by `rbln-serve serve MODEL`. In the image `vllm serve` is the "
    "same command, so that manifests written for vLLM's image start this server. The page lists "
    "the absent routes and every flag of `vllm serve`. A refused flag ends the start with exit "
    "code 2, an absent route answers 404 `route_not_found`."
)
ROUTE_HEADER = ("Routes of `vllm serve`", "vLLM offers them", "Here")
FLAG_HEADER = ("Flags", "Why they are refused")
ACCEPTED_HEADER = ("Flags", "Here")
HONOURED_HEADER = ("About", "Flags")

_METHODS = {"get", "post", "put", "delete", "websocket"}
# Folder or file below vllm/entrypoints: when vLLM offers its routes, and what to use here.
_FAMILIES: dict[str, tuple[str, str]] = {
    "cohere": ("with `VLLM_ENABLE_COHERE_API=1`", "`/v1/chat/completions`"),
    "generate/generative_scoring": ("always", "`/v1/completions` with `prompt_logprobs`"),
    "launchers/dp_supervisor": ("in the supervisor of several servers", "`/readyz`"),
    "openai/chat_completion": ("always", "`/v1/batches` ([batches](batches.md))"),
    "scale_out/derender": ("with `--enable-scale-out`", "none"),
    "scale_out/render": ("with `--enable-scale-out`", "the routes of chats and of completions"),
    "scale_out/token_in_token_out": ("with `--enable-scale-out`", "none"),
    "serve/dev/cache": ("with `VLLM_SERVER_DEV_MODE=1`", "none; models take no images"),
    "serve/dev/rlhf": ("with `VLLM_SERVER_DEV_MODE=1`", "none; weights are loaded at start"),
    "serve/dev/rpc": ("with `VLLM_SERVER_DEV_MODE=1`", "none"),
    "serve/dev/server_info": ("with `VLLM_SERVER_DEV_MODE=1`", "`/v1/server_info`"),
    "serve/dev/sleep": ("with `VLLM_SERVER_DEV_MODE=1`", "none; see `/admin/drain`"),
    "serve/elastic_ep": ("always", "none; ranks are set at start"),
    "serve/fault_tolerance": ("with `--enable-fault-tolerance`", "none"),
    "serve/instrumentator/offline_docs": ("with `--enable-offline-docs`", "`/openapi.json`"),
    "speech_to_text": ("for models of speech", "none; such models are refused"),
}


def absent_route_rows() -> Iterable[tuple[str, ...]]:
    """Yield the absent routes of each part of vLLM with their replacement.

    Raises `ValueError` for a part that `_FAMILIES` lacks, and for one that has no absent route.
    """
    served = {route.template for route in ROUTES}
    found: dict[str, set[str]] = {}
    for part, path in _upstream_routes():
        if path not in served:
            family = next((name for name in _FAMILIES if part.startswith(name)), None)
            if family is None:
                raise ValueError(f"docs/upstream_page.py: _FAMILIES lacks {part} ({path})")
            found.setdefault(family, set()).add(path)
    if unused := _FAMILIES.keys() - found.keys():
        raise ValueError(f"docs/upstream_page.py: all routes are served of {sorted(unused)}")
    for family, (condition, here) in _FAMILIES.items():
        yield ", ".join(f"`{path}`" for path in sorted(found[family])), condition, here


def refused_flag_rows() -> Iterable[tuple[str, ...]]:
    """Yield the refused flags of each reason."""
    yield from _by_text(REFUSED_FLAGS)


def checked_flag_rows() -> Iterable[tuple[str, ...]]:
    """Yield the flags of which the engine accepts some values."""
    yield from _by_text(CHECKED_FLAGS)


def honoured_flag_rows() -> Iterable[tuple[str, ...]]:
    """Yield the flags that keep their meaning, by subject."""
    for subject, names in HONOURED_FLAGS.items():
        yield subject, ", ".join(_flag(name) for name in names)


def _by_text(flags: Mapping[str, str]) -> Iterable[tuple[str, ...]]:
    by_text: dict[str, list[str]] = {}
    for name, text in flags.items():
        by_text.setdefault(text, []).append(_flag(name))
    for text, named in by_text.items():
        yield ", ".join(named), text


def accepted_flag_rows() -> Iterable[tuple[str, ...]]:
    """Yield the flags that are renamed or need no setting here."""
    for name, own in RENAMED_FLAGS.items():
        yield _flag(name), _flag(own)
    yield from _by_text(FULFILLED_FLAGS)


def _flag(name: str) -> str:
    return "`--" + name.replace("_", "-") + "`"


def _upstream_routes() -> Iterable[tuple[str, str]]:
    """Yield the file below vllm/entrypoints, without suffix, and the path of each of its routes."""
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    root = Path(spec.origin).parent / "entrypoints"
    for file in sorted(root.rglob("*.py")):
        text = file.read_text(encoding="utf-8")
        if "router." not in text and "app." not in text:
            continue
        part = str(file.relative_to(root).with_suffix(""))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield from ((part, path) for path in _decorated_paths(node))


def _decorated_paths(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterable[str]:
    for call in node.decorator_list:
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr in _METHODS
            and call.args
            and isinstance(call.args[0], ast.Constant)
            and isinstance(call.args[0].value, str)
        ):
            yield call.args[0].value
