"""xgrammar's compiler with bounded whitespace, and the mask of its tokens for JSON.

Imported at the first compile."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import xgrammar

MAX_WHITESPACE = 32
"""Longest run of whitespace between two parts of JSON: indents 8 levels by 4, and keeps models from
filling their context with blanks."""


class BoundedCompiler(xgrammar.GrammarCompiler):
    """xgrammar's compiler with a bound on whitespace in JSON."""

    def compile_json_schema(self, schema: Any, **options: Any) -> xgrammar.CompiledGrammar:
        bounded = {"max_whitespace_cnt": MAX_WHITESPACE, **options}
        return super().compile_json_schema(schema, **bounded)

    def compile_structural_tag(self, *tag: Any, **options: Any) -> xgrammar.CompiledGrammar:
        if len(tag) == 1 and isinstance(tag[0], str):
            value = json.loads(tag[0])
            _bound(value)
            tag = (json.dumps(value),)
        return super().compile_structural_tag(*tag, **options)


def _bound(value: Any) -> None:
    """Bound the whitespace of every piece of JSON in a structural tag, in place."""
    if isinstance(value, dict):
        if value.get("type") == "json_schema" and value.get("style", "json") == "json":
            if value.get("max_whitespace_cnt") is None:
                value["max_whitespace_cnt"] = MAX_WHITESPACE
            return
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            _bound(item)


def bounded_compiler(info: xgrammar.TokenizerInfo, cache_bytes: int) -> BoundedCompiler:
    """Return a compiler that starts no threads and caches `cache_bytes` of grammars."""
    return BoundedCompiler(info, max_threads=1, cache_limit_bytes=cache_bytes)


def tokens_without_controls(tokens: Sequence[bytes], allowed: bytes) -> npt.NDArray[np.int32]:
    """Return a bit per token, set unless the token has a control character that is not `allowed`.

    xgrammar 0.2.8 lets control characters into strings of a bounded length, where JSON forbids
    them. Tabs go with them: xgrammar keeps nothing but line ends out of such strings.
    """
    legal = np.zeros((len(tokens) + 31) // 32 * 32, dtype=np.uint8)
    controls = bytes(set(range(ord(" "))) - set(allowed))
    legal[: len(tokens)] = [len(token.translate(None, controls)) == len(token) for token in tokens]
    return np.packbits(legal, bitorder="little").view(np.int32)
