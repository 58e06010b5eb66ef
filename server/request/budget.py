"""Size limits of each field, checked first, so that all later work is bounded.

One walk counts items and values and measures texts. `server.request.limits` and the request models
check what the values mean. Pure functions.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from server.errors import ContextLengthError, InvalidValueError, describe
from server.request.endpoints import FieldKind, kind_of_field
from server.wire.endpoint import Endpoint, JsonObject

MAX_FIELDS = 256
"""Most fields of a body; request models have fewer than a hundred."""
MIN_TEXT_CHARS = 1 << 20
CHARS_PER_TOKEN = 16
"""Characters per token of the context: a longer text does not fit, except in rare scripts."""
_VALUES_PER_MESSAGE = 16
"""Objects, arrays, texts and numbers of a message with a few parts or calls."""
_ANY = 1 << 62


@dataclass(frozen=True, slots=True)
class Size:
    """Limits of a field: its items, the values nested in it, the characters of one text."""

    items: int = _ANY
    values: int = _ANY
    chars: int = _ANY
    flag: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Size limits of one server; `max_text_chars` None derives it from the context."""

    max_messages: int
    max_prompts: int
    max_tools: int
    max_model_len: int
    vocab_size: int
    max_text_chars: int | None = None

    @property
    def text_chars(self) -> int:
        """Most characters of one text."""
        derived = max(MIN_TEXT_CHARS, CHARS_PER_TOKEN * self.max_model_len)
        return self.max_text_chars or derived


@functools.lru_cache(maxsize=1)
def _sizes(budget: Budget) -> Mapping[FieldKind, Size]:
    """Return the limits of each kind of field; cached for all bodies of a server."""
    text, messages, prompts = budget.text_chars, budget.max_messages, budget.max_prompts
    return {
        FieldKind.CONVERSATION: Size(
            messages, messages * _VALUES_PER_MESSAGE, text, "--max-messages"
        ),
        # Token ids within are measured against the context.
        FieldKind.PROMPTS: Size(
            messages + prompts,
            (messages + prompts) * _VALUES_PER_MESSAGE,
            text,
            "--max-prompts",
        ),
        FieldKind.TOKENS: Size(budget.max_model_len),
        FieldKind.IDS: Size(budget.vocab_size, budget.vocab_size + 1, 64),
        FieldKind.TOOLS: Size(budget.max_tools, 256 * budget.max_tools, 1 << 16, "--max-tools"),
        FieldKind.GRAMMAR: Size(values=1 << 16),
        FieldKind.WORDS: Size(256, 257, 1024),
        FieldKind.OPTIONS: Size(1024, 1024, 1 << 16),
        FieldKind.NAME: Size(64, 64, 1024),
        FieldKind.TEMPLATE: Size(1, 1, 1 << 16),
    }


def check_budget(endpoint: Endpoint, body: JsonObject, budget: Budget) -> None:
    """Raise the `RequestError` of the first field that is too large; `body` is the parsed JSON."""
    if len(body) > MAX_FIELDS:
        raise InvalidValueError(f"A request may have at most {MAX_FIELDS} fields, got {len(body)}.")
    sizes = _sizes(budget)
    may_be_cut = body.get("truncate_prompt_tokens") is not None
    for name, value in body.items():
        if isinstance(value, list | dict | str):
            kind = kind_of_field(endpoint, name)
            if kind is FieldKind.PROMPTS and isinstance(value, list):
                most = budget.text_chars if may_be_cut else budget.max_model_len
                value = _check_token_lists(name, value, most)
            _check_size(name, value, kind, sizes[kind])


def _check_token_lists(name: str, value: list[object], most: int) -> list[object]:
    """Check prompts of token ids against `most`; return the other prompts."""
    if _are_tokens(value):
        _check_length(name, value, most)
        return []
    others = []
    for index, item in enumerate(value):
        if isinstance(item, list) and _are_tokens(item):
            _check_length(f"{name}[{index}]", item, most)
        else:
            others.append(item)
    return others


def _are_tokens(items: list[object]) -> bool:
    return bool(items) and isinstance(items[0], int)


def _check_length(path: str, tokens: list[object], most: int) -> None:
    if len(tokens) > most:
        raise ContextLengthError(
            f"'{path}' has {len(tokens)} token ids; at most {most} fit into this model's context.",
            param=path,
        )


def _check_size(
    name: str, value: list[object] | JsonObject | str, kind: FieldKind, size: Size
) -> None:
    hint = f" ({size.flag})" if size.flag else ""
    if not isinstance(value, str) and len(value) > size.items:
        raise InvalidValueError(
            f"'{name}' must have at most {size.items} items on this server{hint}, got "
            f"{len(value)}.",
            param=name,
        )
    values, level = 0, [value]
    while level:
        values += len(level)
        if values > size.values:
            raise InvalidValueError(
                f"'{name}' holds more than {size.values} objects, arrays, texts and numbers, the "
                f"limit of this server{hint}.",
                param=name,
            )
        level = _below(name, level, kind, size.chars)


def _below(name: str, level: Sequence[object], kind: FieldKind, chars: int) -> list[Any]:
    """Return the values in the containers of a level; texts and keys of objects are measured."""
    below: list[object] = []
    for item in level:
        if isinstance(item, str):
            _check_text(name, item, kind, chars)
        elif isinstance(item, list):
            below += item
        elif isinstance(item, dict):
            for key in item:
                _check_text(name, key, kind, chars)
            below += item.values()
    return below


def _check_text(name: str, text: str, kind: FieldKind, most: int) -> None:
    if len(text) <= most:
        return
    prompt = kind in (FieldKind.CONVERSATION, FieldKind.PROMPTS)
    raise (ContextLengthError if prompt else InvalidValueError)(
        f"'{name}' holds a text of {len(text)} characters, {describe(text, 40)}; the limit of this "
        f"server is {most}{' (--max-text-chars)' if prompt else ''}.",
        param=name,
    )
