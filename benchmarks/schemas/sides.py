"""Compilers of JSON schemas that are compared, over one tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import llguidance
import llguidance.hf
import numpy as np
import torch
from transformers import AutoTokenizer

from default_model.paths import CHECKPOINT
from rbln_backend.grammar.lark import LarkCompiler, LarkGrammar
from server.structured_outputs.constraint import Constraint, ConstraintKind
from server.structured_outputs.grammars import SchemaRules
from server.structured_outputs.trial import do_job, job_bytes


class RefusedSchemaError(ValueError):
    """A side cannot compile a schema; the message has its reason."""


class SchemaWalk(Protocol):
    """A compiled schema at one place of a text."""

    def mask(self) -> None:
        """Compute the mask of the next token."""
        ...

    def allows(self, token: int) -> bool:
        """Return whether the mask has a token; the end token ends a text."""
        ...

    def take(self, token: int) -> None:
        """Go on by an allowed token."""
        ...


Compile = Callable[[Any], SchemaWalk]
"""Returns a schema's grammar at its beginning; raises `RefusedSchemaError`."""


@cache
def tokenizer() -> Any:
    """Return the tokenizer of the default model, which is SmolLM2's."""
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@cache
def _lark_compiler() -> LarkCompiler:
    return LarkCompiler(tokenizer(), len(tokenizer()))


def end_token() -> int:
    """Return the token that ends a text."""
    return int(tokenizer().eos_token_id)


class _BitmaskWalk:
    """A walk with a mask of one bit per token ([1, V/32] int32)."""

    def __init__(self, grammar: Any) -> None:
        self._grammar = grammar
        self._bits = torch.zeros((1, (len(tokenizer()) + 31) // 32), dtype=torch.int32)

    def mask(self) -> None:
        self._grammar.fill_bitmask(self._bits, 0)

    def allows(self, token: int) -> bool:
        return bool(self._bits[0].numpy().view(np.uint32)[token >> 5] >> (token & 31) & 1)

    def take(self, token: int) -> None:
        self._grammar.accept_tokens("benchmark", [token])


def grammar_of(schema: Any, *, closed: bool) -> LarkGrammar:
    """Return our grammar of a schema, by the server's checks and the engine's limits."""
    constraint = Constraint(ConstraintKind.JSON, json.dumps(schema), "schema")
    rules = SchemaRules(compact=False, closed=closed)
    verdict = do_job(job_bytes([constraint]), lambda _kind, _text: [], rules)
    if verdict.grammar is None:
        raise RefusedSchemaError(verdict.reason)
    try:
        return _lark_compiler().compile(verdict.grammar, {end_token()}, in_trial=False)
    except ValueError as error:
        raise RefusedSchemaError(str(error)) from None


def compile_omitting(schema: Any) -> SchemaWalk:
    """Return our grammar with `--undeclared-properties omit`."""
    return _BitmaskWalk(grammar_of(schema, closed=True))


def compile_allowing(schema: Any) -> SchemaWalk:
    """Return our grammar with `--undeclared-properties allow`."""
    return _BitmaskWalk(grammar_of(schema, closed=False))


@cache
def _llguidance_tokenizer() -> llguidance.LLTokenizer:
    return llguidance.hf.from_tokenizer(tokenizer(), len(tokenizer()))


class _LlguidanceWalk:
    """A walk of a released llguidance matcher."""

    def __init__(self, matcher: llguidance.LLMatcher) -> None:
        self._matcher = matcher
        self._mask = b""

    def mask(self) -> None:
        self._mask = self._matcher.compute_bitmask()

    def allows(self, token: int) -> bool:
        if token == end_token():
            return bool(self._matcher.is_accepting())
        return bool(self._mask[token >> 3] >> (token & 7) & 1)

    def take(self, token: int) -> None:
        self._matcher.consume_token(token)


def compile_by_llguidance(schema: Any) -> SchemaWalk:
    """Return llguidance's own grammar of a schema, with its defaults."""
    try:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(json.dumps(schema))
    except ValueError as error:
        raise RefusedSchemaError(str(error)) from None
    matcher = llguidance.LLMatcher(_llguidance_tokenizer(), grammar, log_level=0)
    if matcher.is_error():
        raise RefusedSchemaError(matcher.get_error())
    return _LlguidanceWalk(matcher)


SIDES: dict[str, Compile] = {
    "ours, omit": compile_omitting,
    "ours, allow": compile_allowing,
    "llguidance": compile_by_llguidance,
}


def warm_up(side: str) -> None:
    """Compile a small schema, so that no measurement has the start of a library in it."""
    walk = SIDES[side]({"type": "object", "properties": {"a": {"type": "string"}}})
    walk.mask()
