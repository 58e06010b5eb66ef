"""Requests that once held the event loop, and everything like them.

Every field of every request form that takes a list, an object or a text is found from vLLM's
request models and filled with up to a million entries of several kinds; places inside of messages,
tools and schemas are listed by hand, and so is what an attack found. A new finding is a new line.
"""

import dataclasses
import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args, get_origin

from server.request.endpoints import get_forms
from server.vllm.models import request_models
from server.wire import Endpoint

MAX_BYTES = 4 * 1024 * 1024 - 4096
SIZES = (100, 10_000, 1_000_000)
USER = {"role": "user", "content": "hi"}
_HOLE = "\x00"

# A valid body of each form, without its model.
BODIES: dict[str, dict[str, Any]] = {
    "chat": {"messages": [USER], "max_tokens": 1},
    "completion": {"prompt": "hi", "max_tokens": 1},
    "responses": {"input": "hi", "max_output_tokens": 1},
    "input_tokens": {"input": "hi"},
    "compact": {"input": "hi"},
    "messages": {"messages": [USER], "max_tokens": 1},
    "count_tokens": {"messages": [USER]},
    "render_chat": {"messages": [USER]},
    "render_completion": {"prompt": "hi"},
    "tokenize": {"prompt": "hi"},
    "tokenize_chat": {"messages": [USER]},
    "detokenize": {"tokens": [5]},
    "embeddings": {"input": "hi"},
    "embeddings_chat": {"messages": [USER]},
    "embeddings_chats": {"messages": [[USER]]},
    "embeddings_chat_input": {"input": [USER]},
    "embeddings_chats_input": {"input": [[USER]]},
    "cohere_embed": {"texts": ["hi"], "input_type": "search_query"},
    "pooling": {"input": "hi"},
    "pooling_chat": {"messages": [USER]},
    "classify": {"input": "hi"},
    "classify_chat": {"messages": [USER]},
    "score": {"queries": "hi", "documents": ["ho"]},
    "score_items": {"queries": "hi", "items": ["ho"]},
    "score_data": {"data_1": "hi", "data_2": ["ho"]},
    "score_text": {"text_1": "hi", "text_2": ["ho"]},
    "rerank": {"query": "hi", "documents": ["ho"]},
}

ENTRIES: dict[str, str] = {
    "objects": "{}",
    "arrays": "[]",
    "ints": "5",
    "texts": '"a"',
    "nulls": "null",
    "turns": '{"role":"user","content":"h"}',
    "parts": '{"type":"text","text":"a"}',
}

_PARTS = {"role": "user", "content": _HOLE}
_CALLS = {"role": "assistant", "tool_calls": _HOLE}
_TOOL = {"type": "function", "function": {"name": "f", "parameters": _HOLE}}
# Places inside of fields: form, body.
PLACES: list[tuple[str, dict[str, Any]]] = [
    *((form, {"messages": [_PARTS]}) for form in ("chat", "messages", "tokenize_chat")),
    ("chat", {"messages": [_CALLS, USER]}),
    ("chat", {"messages": [USER], "tools": [_TOOL]}),
    ("chat", {"messages": [USER], "tools": [{**_TOOL, "type": _HOLE}]}),
    ("chat", {"messages": [USER], "response_format": {"type": "json_schema", "schema": _HOLE}}),
    ("chat", {"messages": [USER], "structured_outputs": {"choice": _HOLE}}),
    ("chat", {"messages": [USER], "structured_outputs": {"json": {"properties": _HOLE}}}),
    ("chat", {"messages": [{"role": _HOLE, "content": "x"}] * 300}),
    ("responses", {"input": [_PARTS]}),
    ("responses", {"input": [{"type": "function_call_output", "output": _HOLE}]}),
    ("responses", {"input": "x", "tools": [{"type": "function", "parameters": _HOLE}]}),
    ("messages", {"messages": [USER], "system": _HOLE, "max_tokens": 1}),
    ("messages", {"messages": [USER], "tools": [{"name": "f", "input_schema": _HOLE}]}),
    ("completion", {"prompt": [_HOLE]}),
    ("embeddings", {"input": [_HOLE]}),
    ("rerank", {"query": "q", "documents": [{"content": _HOLE}]}),
]


@dataclass(frozen=True, slots=True)
class Case:
    """One request; `name` says what is large or wrong in it."""

    name: str
    path: str
    body: bytes


def endpoint_of(form: str) -> Endpoint:
    return next(endpoint for endpoint in Endpoint if form in get_forms(endpoint, [form]))


def large_fields() -> Iterator[tuple[str, str]]:
    """Yield each form with each of its model's fields that may hold more than one value."""
    for form, model in request_models().items():
        for name, field in model.model_fields.items():
            if _may_be_large(field.annotation):
                yield form, field.alias or name


def cases(sizes: tuple[int, ...] = SIZES, *, pooling: bool) -> Iterator[Case]:
    """Yield the requests for a model that pools, or for one that generates."""
    for form, name in large_fields():
        if endpoint_of(form).pools == pooling:
            yield from _filled(form, {**BODIES[form], name: _HOLE}, name, sizes)
    for form, body in PLACES:
        if endpoint_of(form).pools == pooling:
            yield from _filled(form, body, "inside", sizes)
    if not pooling:
        yield from _found()


def _may_be_large(annotation: Any) -> bool:
    if annotation in (str, bytes, Any):
        return True
    origin = get_origin(annotation)
    if origin is not None and str(origin).endswith("Literal"):
        return False
    if isinstance(origin, type) and issubclass(origin, list | dict | tuple | set):
        return True
    if hasattr(annotation, "model_fields") or dataclasses.is_dataclass(annotation):
        return True
    return any(_may_be_large(part) for part in get_args(annotation) if part is not annotation)


def _filled(form: str, body: dict[str, Any], what: str, sizes: tuple[int, ...]) -> Iterator[Case]:
    path = endpoint_of(form).value
    before, _, after = json.dumps({"model": "tiny", **body}).partition(json.dumps(_HOLE))
    for size in sizes:
        for kind, entry in ENTRIES.items():
            number = min(size, (MAX_BYTES - len(before) - len(after)) // (len(entry) + 1))
            filling = ",".join([entry] * number)
            yield Case(
                f"{form}.{what}: {size} {kind}", path, f"{before}[{filling}]{after}".encode()
            )
        number = min(size, MAX_BYTES - len(before) - len(after) - 2)
        text = json.dumps("a" * number)
        yield Case(f"{form}.{what}: a text of {size}", path, f"{before}{text}{after}".encode())
        keys = ",".join(f'"{index}":1' for index in range(min(size, MAX_BYTES // 12)))
        yield Case(f"{form}.{what}: {size} keys", path, f"{before}{{{keys}}}{after}".encode())


def _found() -> Iterator[Case]:
    """What attacks have found so far, each as it was."""
    chat = Endpoint.CHAT.value
    bodies: list[tuple[str, str, dict[str, Any]]] = [
        ("300 empty items", Endpoint.RESPONSES.value, {"input": [{}] * 300}),
        ("5000 empty items", Endpoint.RESPONSES.value, {"input": [{}] * 5000}),
        ("300 empty tools", Endpoint.RESPONSES.value, {"input": "x", "tools": [{}] * 300}),
        ("300 empty parts", chat, {"messages": [{"role": "user", "content": [{}] * 300}]}),
        ("300 odd roles", chat, {"messages": [{"role": 1, "content": "x"}] * 300}),
        ("a name of 4 MB", chat, {"k" * 4_000_000: 1}),
        ("100k names", chat, {**{f"k{i}": 1 for i in range(100_000)}}),
        ("a number of 4000 digits", chat, {"n": 10**4000}),
        ("many words", chat, {"bad_words": ["a b " * 250] * 250}),
        (
            "255 prompts of ids",
            Endpoint.COMPLETION.value,
            {"prompt": [[5] * 200] * 255, "max_tokens": 1},
        ),
    ]
    odd = (1, "x", [], True, 1.5)
    bodies += [(f"structured_outputs {v!r}", chat, {"structured_outputs": v}) for v in odd]
    for name, path, body in bodies:
        messages = {"messages": [USER]} if path == chat else {}
        yield Case(name, path, json.dumps({"model": "tiny", **messages, **body}).encode())
