"""Rows of the table of routes in docs/http_api.md, with methods read from `server/routes`."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

from server import routes
from server.request.endpoints import INVOCATIONS, ROUTES
from server.wire.endpoint import Endpoint

ROUTES_LIST_BEGIN = "<!-- Written by docs/generate.py from server/routes. -->"
ROUTE_LIST_HEADER = ("Routes", "Purpose")

_SOURCES = Path(routes.__file__).parent
_METHODS = {"get", "post", "delete"}
_POOLING = ("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/v1/score")
# Purpose -> beginnings of its paths; a route belongs to the longest beginning that fits.
_PURPOSES: dict[str, tuple[str, ...]] = {
    "OpenAI's APIs": ("/v1/chat/completions", "/v1/completions", "/v1/responses"),
    "[counts prompt tokens](responses.md#counting-tokens)": ("/v1/responses/input_tokens",),
    "[shortens a conversation](responses.md#compaction)": ("/v1/responses/compact",),
    "Anthropic's API": ("/v1/messages",),
    "[the endpoint that the body fits](#sagemaker), as in vLLM": ("/invocations",),
    "[rendered prompts](#rendered-prompts), as in vLLM": (
        *("/v1/chat/completions/render", "/v1/completions/render"),
    ),
    "as in vLLM": ("/tokenize", "/detokenize"),
    "[pooling models](pooling.md)": (*_POOLING, "/rerank", "/v1/rerank", "/v2/rerank"),
    "[stored responses](responses.md), with `--data-dir`": ("/v1/responses/{",),
    "[batches](batches.md), with `--data-dir`": ("/v1/files", "/v1/batches"),
    "the model and its adapters": ("/v1/models",),
    "checks a grammar without generating": ("/v1/structured_outputs",),
    "[adapters](lora.md#routes)": (
        *("/v1/lora_adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"),
    ),
    "takes the server out of service, and back": ("/admin",),
    "profile of the engine's steps, as in vLLM": ("/start_profile", "/stop_profile"),
    "[empties the prefix cache](#the-prefix-cache), as in vLLM": ("/reset_prefix_cache",),
    "probes": ("/livez", "/readyz", "/startupz", "/health", "/ping"),
    "operation": ("/metrics", "/version", "/load", "/v1/server_info", "/openapi.json"),
    "[the console](console.md), at `GET /`": ("/console",),
}
_CONSOLE = "/"


def route_list_rows() -> Iterable[tuple[str, ...]]:
    """Yield the routes of each purpose. Raises `ValueError` for an unknown route."""
    methods = _methods()
    rows: dict[str, list[str]] = {purpose: [] for purpose in _PURPOSES}
    for template in (route.template for route in ROUTES if route.template != _CONSOLE):
        beginnings = [(b, p) for p, all_b in _PURPOSES.items() for b in all_b]
        fitting = [(len(b), purpose) for b, purpose in beginnings if template.startswith(b)]
        if not fitting or template not in methods:
            raise ValueError(f"docs/routes_page.py: no purpose or no handler of {template}")
        rows[max(fitting)[1]].append(f"`{', '.join(methods[template])} {template}`")
    for purpose, listed in rows.items():
        yield ", ".join(listed), purpose


def _methods() -> dict[str, list[str]]:
    """Return the methods of each path, from the decorators of the handlers."""
    methods = {path: ["POST"] for path in (*(e.value for e in Endpoint), INVOCATIONS)}
    for file in sorted(_SOURCES.glob("*.py")):
        for call in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if (
                isinstance(call, ast.Call)
                and isinstance(call.func, ast.Attribute)
                and call.func.attr in _METHODS
                and isinstance(call.func.value, ast.Name)
                and call.func.value.id == "router"
                and isinstance(path := call.args[0], ast.Constant)
            ):
                template = str(path.value).replace(":path}", "}")
                methods.setdefault(template, []).append(call.func.attr.upper())
    return methods
