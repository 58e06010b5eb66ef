"""Random walks through a grammar alone: documents that it allows, without a model."""

import functools
import json
import random
import re
from decimal import Decimal
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from jsonschema import FormatChecker
from jsonschema.validators import Draft202012Validator, validator_for
from transformers import AutoTokenizer

from default_model.paths import CHECKPOINT
from rbln_backend.grammar.lark import LarkCompiler, LarkGrammar
from server.structured_outputs.grammars import MARK, SchemaRules, schema_grammar
from server.structured_outputs.normaliser import FORMATS

_TOKENS = 1000
_TOKENS_IF_ENDLESS = 200
_CLOSING = ("}", "]", ",", ":", '"', "n", "t", "f")
"""Tokens that bring a document to its end, the best first; inside of a string, its quote."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@functools.cache
def vocabulary() -> tuple[LarkCompiler, Any, list[str]]:
    """Return a compiler for the default model, its tokenizer, and the texts of its tokens."""
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    size = len(tokenizer)
    texts = [tokenizer.decode([token]) for token in range(size)]
    return LarkCompiler(tokenizer, size), tokenizer, texts


@functools.cache
def _marks() -> dict[str, list[int]]:
    """Return the tokens of each text, without the blanks around it."""
    found: dict[str, list[int]] = {}
    for token, text in enumerate(vocabulary()[2]):
        found.setdefault(text.strip(), []).append(token)
    return found


@functools.lru_cache(4)
def _grammar(text: str) -> LarkGrammar:
    compiler, tokenizer, _ = vocabulary()
    return compiler.compile(text, {int(tokenizer.eos_token_id)}, in_trial=False)


def documents(grammar: str, count: int, seed: int = 0, *, must_end: bool = True) -> list[str]:
    """Return so many texts of the grammar; fails where one has no way on.

    Without `must_end`, those that have no end soon are left out.
    """
    most = _TOKENS if must_end else _TOKENS_IF_ENDLESS
    found = [_walk(grammar, random.Random(seed + index), most) for index in range(count)]
    assert not must_end or None not in found, "no end"
    return [text for text in found if text is not None]


def accepts(grammar: str, text: str) -> bool:
    _, tokenizer, _ = vocabulary()
    matcher = _grammar(grammar)
    matcher.reset()
    tokens = [*tokenizer(text, add_special_tokens=False).input_ids, int(tokenizer.eos_token_id)]
    return matcher.validate_tokens(tokens) == tokens


def _walk(grammar: str, pick: random.Random, most: int) -> str | None:
    _, tokenizer, texts = vocabulary()
    stop = int(tokenizer.eos_token_id)
    matcher = _grammar(grammar)
    matcher.reset()
    mask = torch.zeros((1, (len(texts) + 31) // 32), dtype=torch.int32)
    taken: list[int] = []
    written = ""
    eager = pick.random()
    while len(taken) < most:
        matcher.fill_bitmask(mask, 0)
        assert not matcher.problem(), matcher.problem()
        bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
        may_stop, bits[stop] = bits[stop], 0
        allowed = np.flatnonzero(bits)
        assert may_stop or allowed.size, tokenizer.decode(taken)
        if may_stop and (not allowed.size or pick.random() < 0.5):
            assert matcher.accept_tokens("walk", [stop]) and matcher.is_terminated()
            return str(tokenizer.decode(taken))
        hurry = len(taken) > 100 or pick.random() < eager
        marks = ('"',) if '"' in written else _CLOSING
        token = _closing(bits, marks, pick) if hurry else None
        token = int(allowed[pick.randrange(allowed.size)]) if token is None else token
        assert matcher.accept_tokens("walk", [token]), texts[token]
        taken.append(token)
        written = _STRING.sub("", written + texts[token])
    return None


def _closing(
    bits: npt.NDArray[np.uint8], marks: tuple[str, ...], pick: random.Random
) -> int | None:
    """Return an allowed token that ends something, or one of a single character, or None."""
    for mark in marks:
        found = [token for token in _marks().get(mark, ()) if bits[token]]
        if found:
            return pick.choice(found)
    short = [token for token in _characters() if bits[token]]
    return pick.choice(short) if short else None


@functools.cache
def _characters() -> list[int]:
    return [token for token, text in enumerate(vocabulary()[2]) if len(text) == 1]


def grammar_of(schema: Any, *, closed: bool = True) -> str:
    """Return the grammar of a schema that is followed exactly."""
    found = schema_grammar(schema, SchemaRules(compact=False, closed=closed))
    assert found.left_out == ()
    return found.text


def try_grammar(_kind: str, text: str) -> list[str]:
    """Compile a grammar for llguidance as a trial does; others are not tried."""
    if text.startswith(MARK):
        vocabulary()[0].compile(text, None, in_trial=True)
    return []


_DOLLAR = re.compile(r"(\\.|\[(?:\\.|[^]\\])*\])|\$", re.DOTALL)


def for_python(schema: Any, parse_float: Any = float) -> Any:
    """Return the schema with `$` as `\\Z`: Python's `$` also fits before a last newline."""

    def written(pattern: Any) -> Any:
        return (
            _DOLLAR.sub(lambda m: m[1] or r"\Z", pattern) if isinstance(pattern, str) else pattern
        )

    def hook(part: dict[str, Any]) -> dict[str, Any]:
        if isinstance(part.get("patternProperties"), dict):
            named = {written(name): rule for name, rule in part["patternProperties"].items()}
            part = {**part, "patternProperties": named}
        return {**part, "pattern": written(part["pattern"])} if "pattern" in part else part

    return json.loads(json.dumps(schema), parse_float=parse_float, object_hook=hook)


def faults(schema: Any, text: str) -> list[str]:
    """Return what jsonschema finds wrong; decimals are exact, and formats as far as followed."""
    exact = for_python(schema, Decimal)
    judge = validator_for(exact, Draft202012Validator)
    checker = FormatChecker(())
    known = judge.FORMAT_CHECKER.checkers
    checker.checkers = {name: known[name] for name in FORMATS if name in known}
    value = json.loads(text, parse_float=Decimal)
    found = judge(exact, format_checker=checker).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in found]


def empty_mask() -> torch.Tensor:
    """Return a mask of the vocabulary ([1, V/32] int32) to be filled."""
    return torch.zeros((1, (len(vocabulary()[2]) + 31) // 32), dtype=torch.int32)
