"""The vocabulary of a file, checked before a tokenizer is made of it.

The tokenizers library stops at a wrong list with an error of its own, or takes it and gives other
tokens; an id beyond the embeddings would stop the engine. Each error names the key and what is
accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from rbln_backend.errors import CheckpointError

TOKENS = "tokenizer.ggml.tokens"
_TYPES, _SCORES = "tokenizer.ggml.token_type", "tokenizer.ggml.scores"
_MERGES = "tokenizer.ggml.merges"
_MAX_TYPE = 6
"""Undefined, normal, unknown, control, user-defined, unused, byte."""
_MAX_TOKEN = 1 << 10
_FLAGS = ("add_bos_token", "add_eos_token", "add_space_prefix")
_IDS = ("bos", "eos", "eot", "eom", "unknown", "padding")


def check_vocabulary(keys: Mapping[str, Any], num_embeddings: int) -> None:
    """Raise `CheckpointError` for keys of the tokenizer that are missing or do not fit."""
    tokens = _tokens(keys, num_embeddings)
    for place, kind in enumerate(_list(keys, _TYPES, len(tokens))):
        if type(kind) is not int or not 0 <= kind <= _MAX_TYPE:
            _refuse(f"{_TYPES}[{place}]", kind, f"a whole number from 0 to {_MAX_TYPE}")
    for place, score in enumerate(_list(keys, _SCORES, len(tokens))):
        if type(score) not in (int, float) or not math.isfinite(score):
            _refuse(f"{_SCORES}[{place}]", score, "a number")
    if _MERGES in keys:
        _check_merges(keys[_MERGES], set(tokens))
    elif _SCORES not in keys:
        raise CheckpointError(f"the file has neither {_MERGES} nor {_SCORES}")
    _check_single(keys, len(tokens))


def _check_single(keys: Mapping[str, Any], num_tokens: int) -> None:
    """Check what is not a list."""
    for name in _IDS:
        key = f"tokenizer.ggml.{name}_token_id"
        value = keys.get(key, 0)
        if type(value) is not int or not 0 <= value < num_tokens:
            _refuse(key, value, f"a token from 0 to {num_tokens - 1:,}")
    for name in _FLAGS:
        if not isinstance(value := keys.get(f"tokenizer.ggml.{name}", True), bool):
            _refuse(f"tokenizer.ggml.{name}", value, "true or false")
    if not isinstance(template := keys.get("tokenizer.chat_template", ""), str):
        _refuse("tokenizer.chat_template", template, "a text")


def _tokens(keys: Mapping[str, Any], num_embeddings: int) -> Sequence[str]:
    tokens = keys.get(TOKENS)
    if not isinstance(tokens, list) or not tokens or not isinstance(tokens[0], str):
        _refuse(TOKENS, type(tokens).__name__ if tokens else tokens, "a list of texts")
    if len(tokens) > num_embeddings:
        _refuse(
            TOKENS, f"{len(tokens):,} tokens", f"at most {num_embeddings:,}, one for each embedding"
        )
    places: dict[str, int] = {}
    for place, token in enumerate(tokens):
        if len(token) > _MAX_TOKEN:
            _refuse(f"{TOKENS}[{place}]", f"{len(token):,} characters", f"at most {_MAX_TOKEN:,}")
        first = places.setdefault(token, place)
        if first != place and token:
            _refuse(f"{TOKENS}[{place}]", token, f"another token than that of {first}")
    return tokens


def _list(keys: Mapping[str, Any], name: str, length: int) -> Sequence[Any]:
    """A list of one value for each token, empty where the file has none."""
    if name not in keys:
        return ()
    values = keys[name]
    if not isinstance(values, list):
        _refuse(name, type(values).__name__, "a list of numbers")
    if len(values) != length:
        _refuse(name, f"{len(values):,} values", f"{length:,}, one for each token")
    return values


def _check_merges(merges: object, tokens: set[str]) -> None:
    if not isinstance(merges, list):
        _refuse(_MERGES, type(merges).__name__, "a list of texts")
    for place, merge in enumerate(merges):
        parts = merge.split(" ") if isinstance(merge, str) else ()
        if len(parts) != 2 or not all(parts):
            _refuse(f"{_MERGES}[{place}]", merge, "two tokens with a space between them")
        for token in (*parts, "".join(parts)):
            if token not in tokens:
                _refuse(f"{_MERGES}[{place}]", merge, f"of tokens; {token!r:.60} is not one")


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise CheckpointError(f"{name}: {value!r:.100}; must be {wanted}")
