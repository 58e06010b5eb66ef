"""Random walks through a grammar alone: documents that it allows, without a model."""

from __future__ import annotations

import functools
import json
import random
import re
from decimal import Decimal
from typing import Any

import numpy as np
import torch
from jsonschema.validators import Draft202012Validator, validator_for
from transformers import AutoTokenizer

from default_model.paths import CHECKPOINT
from rbln_backend.grammar.lark import LarkCompiler

_TOKENS = 1000
_TOKENS_IF_ENDLESS = 200
_CLOSING = ("}", "]", ",", ":", '"', "0", "1", "n", "t", "f")
"""Tokens that bring a document to its end, the best first; inside of a string, its quote."""
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')


@functools.cache
def _vocabulary() -> tuple[LarkCompiler, Any, list[str]]:
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    size = len(tokenizer)
    texts = [tokenizer.decode([token]) for token in range(size)]
    return LarkCompiler(tokenizer, size), tokenizer, texts


def documents(grammar: str, count: int, seed: int = 0, *, must_end: bool = True) -> list[str]:
    """Return so many texts of the grammar; fails where one has no way on.

    Without `must_end`, those that have no end soon are left out.
    """
    most = _TOKENS if must_end else _TOKENS_IF_ENDLESS
    found = [_walk(grammar, random.Random(seed + index), most) for index in range(count)]
    assert not must_end or None not in found, "no end"
    return [text for text in found if text is not None]


def accepts(grammar: str, text: str) -> bool:
    """Whether a whole text is of the grammar."""
    compiler, tokenizer, _ = _vocabulary()
    stop = int(tokenizer.eos_token_id)
    matcher = compiler.compile(grammar, {stop}, in_trial=True)
    tokens = [*tokenizer(text, add_special_tokens=False).input_ids, stop]
    return matcher.validate_tokens(tokens) == tokens


def _walk(grammar: str, pick: random.Random, most: int) -> str | None:
    compiler, tokenizer, texts = _vocabulary()
    stop = int(tokenizer.eos_token_id)
    matcher = compiler.compile(grammar, {stop}, in_trial=True)
    mask = torch.zeros((1, (len(texts) + 31) // 32), dtype=torch.int32)
    taken: list[int] = []
    told = ""
    eager = pick.random()
    while len(taken) < most:
        matcher.fill_bitmask(mask, 0)
        assert not matcher.problem(), matcher.problem()
        bits = np.unpackbits(mask[0].numpy().view(np.uint8), bitorder="little")
        allowed = [int(token) for token in np.flatnonzero(bits)]
        assert allowed, tokenizer.decode(taken)
        if stop in allowed and (len(allowed) == 1 or pick.random() < 0.5):
            assert matcher.accept_tokens("walk", [stop]) and matcher.is_terminated()
            return str(tokenizer.decode(taken))
        allowed = [token for token in allowed if token != stop]
        hurry = len(taken) > 100 or pick.random() < eager
        marks = ('"',) if '"' in told else _CLOSING
        token = _closing(allowed, texts, marks, pick) if hurry else pick.choice(allowed)
        assert matcher.accept_tokens("walk", [token]), texts[token]
        taken.append(token)
        told = _STRING.sub("", told + texts[token])
    return None


def _closing(
    allowed: list[int], texts: list[str], marks: tuple[str, ...], pick: random.Random
) -> int:
    """Return a token that ends something, if one does."""
    for mark in marks:
        found = [token for token in allowed if texts[token].strip() == mark]
        if found:
            return pick.choice(found)
    short = [token for token in allowed if len(texts[token]) <= 2]
    return pick.choice(short or allowed)


def faults(schema: Any, text: str, *, formats: bool = True) -> list[str]:
    """Return what jsonschema finds wrong; decimals are exact, and `formats` are judged."""
    exact = json.loads(json.dumps(schema), parse_float=Decimal)
    judge = validator_for(exact, Draft202012Validator)
    value = json.loads(text, parse_float=Decimal)
    checker = judge.FORMAT_CHECKER if formats else None
    found = judge(exact, format_checker=checker).iter_errors(value)
    return [f"{error.json_path}: {error.message}" for error in found]
