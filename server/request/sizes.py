"""Size limits of each field, checked first, so that all later work is bounded.

One walk counts items and values and measures texts. The arguments of earlier calls are JSON within
a text, which templates get parsed: they have limits of their own. `server.request.values` and the
request models check what the values mean. Pure functions.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.errors import ContextLengthError, InvalidValueError, describe
from server.request.body import MANY_DIGITS, MAX_DIGITS
from server.request.endpoints import is_message
from server.request.tables import FieldKind, fields_by_name
from server.tools import replace_halves
from server.wire import Endpoint, JsonObject

MAX_FIELDS = 256
"""Most fields of a body; request models have fewer than a hundred."""
_VALUES_PER_MESSAGE = 16
"""Objects, arrays, texts and numbers of a message with a few parts or calls."""
_ANY = 1 << 62
_CONVERSATIONS = (FieldKind.MESSAGES, FieldKind.CONVERSATION)
_PROMPTS = (FieldKind.PROMPTS, FieldKind.TEXT)
_TEXTS = (*_CONVERSATIONS, *_PROMPTS)
_MIN_TEXT_CHARS = 1 << 20
_CHARS_PER_TOKEN = 16
"""Characters per token of the context: a longer text does not fit, except in rare scripts."""
_PARTS = re.compile(
    r'"(?:[^"\\]|\\.)*+"?|(?P<open>[\[{])|(?P<close>[\]}])'
    rf"|(?<![\d.eE+])(?P<huge>\d{{{MAX_DIGITS + 1},}})(?![\d.eE])",
    re.DOTALL,
)
"""Of JSON, valid or not: strings, brackets, and integers that are too long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLimits:
    """Limits of one server; lengths are in tokens."""

    max_messages: int
    max_prompts: int
    max_tools: int
    max_n: int
    max_stop: int
    max_logit_bias: int
    max_model_len: int
    vocab_size: int
    """One more than the last id that the tokenizer has a token for."""
    max_queued_tokens: int | None
    has_priorities: bool
    text_only: bool = False
    """True if conversations may have no images, audio or video."""
    transfers_kv: bool = False
    missing_ids: frozenset[int] = frozenset()
    """Ids without a token."""
    extra_args: frozenset[str] | None = frozenset()
    """Accepted keys of `vllm_xargs`; None accepts any but those that the server sets."""
    max_logprobs: int = 20
    """Most log-probabilities of a token; -1: as many as the vocabulary has tokens."""
    dimensions: range | tuple[int, ...] = ()
    """Lengths that an embedding may be cut to; empty for a model that was not trained for it."""

    @property
    def text_chars(self) -> int:
        """Most characters of one text."""
        return max(_MIN_TEXT_CHARS, _CHARS_PER_TOKEN * self.max_model_len)


@dataclass(frozen=True, slots=True)
class Size:
    """Limits of a field: its items, the values nested in it, the characters of one text."""

    items: int = _ANY
    values: int = _ANY
    chars: int = _ANY


@functools.lru_cache(maxsize=1)
def _sizes(limits: RequestLimits) -> Mapping[FieldKind, Size]:
    """Return the limits of each kind of field; cached for all bodies of a server."""
    text, messages, prompts = limits.text_chars, limits.max_messages, limits.max_prompts
    ids = Size(limits.vocab_size, limits.vocab_size + 1, 64)
    words = Size(256, 257, 1024)
    conversation = Size(messages, messages * _VALUES_PER_MESSAGE, text)
    values = (messages + prompts) * _VALUES_PER_MESSAGE
    return {
        **dict.fromkeys(FieldKind, Size(1024, 1024, 1 << 16)),
        **dict.fromkeys(_CONVERSATIONS, conversation),
        # Token ids within are measured against the context.
        **dict.fromkeys(_PROMPTS, Size(prompts, values, text)),
        FieldKind.TOKENS: Size(limits.max_model_len),
        **dict.fromkeys((FieldKind.IDS, FieldKind.BIASES), ids),
        FieldKind.TOOLS: Size(limits.max_tools, 256 * limits.max_tools, 1 << 16),
        FieldKind.GRAMMAR: Size(values=1 << 16),
        FieldKind.TRANSFER: Size(values=1 << 16),
        **dict.fromkeys((FieldKind.WORDS, FieldKind.STOP), words),
        FieldKind.NAME: Size(64, 64, 1024),
        FieldKind.TEMPLATE: Size(1, 1, 1 << 16),
    }


def check_sizes(endpoint: Endpoint, body: JsonObject, limits: RequestLimits) -> None:
    """Raise the `RequestError` of the first field that is too large; `body` is the parsed JSON."""
    if len(body) > MAX_FIELDS:
        raise InvalidValueError(f"A request may have at most {MAX_FIELDS} fields, got {len(body)}.")
    sizes = _sizes(limits)
    may_be_cut = body.get("truncate_prompt_tokens") is not None
    rows = fields_by_name(endpoint)
    for name, value in body.items():
        if isinstance(value, list | dict | str):
            kind = counted = rows[name].kind if name in rows else FieldKind.OPTIONS
            if endpoint.pools and kind in _TEXTS and isinstance(value, list) and value:
                # Pooling models take conversations or lists of them.
                counted = FieldKind.MESSAGES if is_message(value[0]) else FieldKind.PROMPTS
            size = sizes[counted]
            nested = value
            if kind is FieldKind.PROMPTS and isinstance(value, list):
                most = limits.text_chars if may_be_cut else limits.max_model_len
                if _are_tokens(value):
                    _check_length(name, value, most)
                    continue
                # Prompts of token ids are measured here, and the other prompts below.
                nested = []
                for index, item in enumerate(value):
                    if isinstance(item, list) and _are_tokens(item):
                        _check_length(f"{name}[{index}]", item, most)
                    else:
                        nested.append(item)
            if not isinstance(value, str) and len(value) > size.items:
                raise InvalidValueError(
                    f"'{name}' must have at most {size.items} items on this server, got "
                    f"{len(value)}.",
                    param=name,
                )
            _check_nested(name, nested, kind, size)


def _are_tokens(items: list[object]) -> bool:
    return set(map(type, items)) == {int}


def _check_length(path: str, tokens: list[object], most: int) -> None:
    if len(tokens) > most:
        raise ContextLengthError(
            f"'{path}' has {len(tokens)} token ids; at most {most} fit into this model's context.",
            param=path,
        )


def _check_nested(
    name: str, value: list[object] | JsonObject | str, kind: FieldKind, size: Size
) -> None:
    """Count the values of a field, level by level; measure its texts and the keys of objects."""
    values, level = 0, [value]
    while level:
        values += len(level)
        if values > size.values:
            raise InvalidValueError(
                f"'{name}' holds more than {size.values} objects, arrays, texts and numbers, the "
                f"limit of this server.",
                param=name,
            )
        texts: list[str] = []
        below: list[Any] = []
        for item in level:
            if isinstance(item, str):
                texts.append(item)
            elif isinstance(item, list):
                below += item
            elif isinstance(item, dict):
                texts += item
                below += item.values()
        for text in texts:
            if len(text) > size.chars:
                raise (ContextLengthError if kind in _TEXTS else InvalidValueError)(
                    f"'{name}' holds a text of {len(text)} characters, {describe(text, 40)}; the "
                    f"limit of this server is {size.chars}.",
                    param=name,
                )
        level = below


def check_call_arguments(body: JsonObject, max_depth: int) -> None:
    """Bound the arguments of earlier calls, and replace halves of surrogate pairs by U+FFFD.

    Models write such halves, and the answers that have them come back. Arguments that are no valid
    JSON pass. Raises `InvalidValueError` for a nesting deeper than `max_depth` or a huge integer.
    """
    for name in ("messages", "input"):
        items = body.get(name)
        for index, item in enumerate(items if isinstance(items, list) else ()):
            if not isinstance(item, dict):
                continue
            # A call is an item, or a function in a message.
            holders = [("", item)]
            calls = item.get("tool_calls")
            for number, call in enumerate(calls if isinstance(calls, list) else ()):
                if isinstance(call, dict) and isinstance(call.get("function"), dict):
                    holders.append((f".tool_calls[{number}].function", call["function"]))
            for path, holder in holders:
                text = holder.get("arguments")
                if isinstance(text, str):
                    _check_arguments(f"{name}[{index}]{path}.arguments", text, max_depth)
                    holder["arguments"] = replace_halves(text)


def _check_arguments(path: str, text: str, max_depth: int) -> None:
    deep = text.count("{") + text.count("[") > max_depth
    if not deep and MANY_DIGITS.search(text.encode()) is None:
        return
    depth = 0
    for part in _PARTS.finditer(text):
        depth += (part["open"] is not None) - (part["close"] is not None)
        if depth > max_depth:
            limit = f"is nested deeper than the limit of {max_depth}"
        elif part["huge"] is not None:
            limit = f"has a number of more than {MAX_DIGITS} digits"
        else:
            continue
        raise InvalidValueError(f"'{path}' {limit}.", param=path)
