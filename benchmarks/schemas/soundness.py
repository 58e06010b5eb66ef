"""Soundness by generation: random walks of our grammars' masks, judged by two validators."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import jsonschema_rs
import numpy as np
import numpy.typing as npt
import torch
from jsonschema import FormatChecker
from jsonschema.validators import Draft202012Validator, validator_for
from torch import Tensor
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar

from benchmarks.schemas.judging import SchemaCase
from benchmarks.schemas.sides import RefusedSchemaError, end_token, grammar_of, tokenizer
from rbln_backend.grammar.lark import Vocabulary
from server.structured_outputs.normaliser import FORMATS
from server.structured_outputs.schema_document import every_schema

_PLAIN = re.compile(rb"[ -~]{1,4}")
_CLOSING = (b'"', b"}", b"]", b",", b":", b"0", b"1")
"""Tokens that bring a text to its end, the best first; numbers may need a digit."""
_EAGER = 0.3
"""Part of the tokens of a sample after which it is brought to its end."""
_END = 0.3
"""Probability of the end at each token where the grammar allows it."""
_FREE = 0.2
"""Probability that a string is none of the words."""
_QUOTE = b'"'
_CLOSE = 0.25
"""Probability of a closing token before that."""


class SampleWalker:
    """Walks grammars over one vocabulary; not thread-safe."""

    def __init__(self, vocabulary: Vocabulary, stop: set[int], mask: Tensor) -> None:
        """`mask` is written by each walk ([1, V/32] int32)."""
        self._tokenizer = vocabulary.tokenizer
        self._stop = sorted(stop)
        self._mask = mask
        self._size = min(vocabulary.size, mask.shape[1] * 32)
        texts = [self._tokenizer.decode_bytes([token]) for token in range(self._size)]
        self._plain = np.array([_PLAIN.fullmatch(text) is not None for text in texts])
        self._short = np.array([len(text) == 1 for text in texts])
        self._tokens = {text: token for token, text in enumerate(texts)}
        self._texts = texts
        self._closing = [self._tokens[text] for text in _CLOSING if text in self._tokens]

    def sample(
        self,
        grammar: StructuredOutputGrammar,
        seed: int,
        most_tokens: int,
        most_s: float,
        words: Sequence[str] = (),
    ) -> tuple[str, bool]:
        """Return a text of a grammar at its beginning, and True if it is complete.

        `words` are contents of JSON strings that the text may need, such as the names of required
        properties; they are tried after quotes. The text is cut after `most_tokens` tokens or
        `most_s` seconds of processor time.
        """
        pick = random.Random(seed)
        taken: list[int] = []
        spelled: list[int] = []
        until = time.thread_time() + most_s
        while len(taken) < most_tokens and time.thread_time() < until:
            grammar.fill_bitmask(self._mask, 0)
            bits = np.unpackbits(self._mask[0].numpy().view(np.uint8), bitorder="little")
            allowed = bits[: self._size].view(np.bool_)
            may_stop = any(allowed[token] for token in self._stop)
            allowed[self._stop] = False
            eager = len(taken) > most_tokens * _EAGER
            if may_stop and (eager or not allowed.any() or pick.random() < _END):
                return self._text(taken), True
            if not allowed.any():
                break
            if not spelled and taken and self._texts[taken[-1]].endswith(_QUOTE):
                spelled = self._spelling(words, taken, pick)
            if not spelled or not allowed[spelled[0]]:
                spelled = [self._choose(allowed, pick, eager=eager)]
            token = spelled.pop(0)
            if not grammar.accept_tokens("sample", [token]):
                break
            taken.append(token)
        return self._text(taken), False

    def _spelling(self, words: Sequence[str], taken: list[int], pick: random.Random) -> list[int]:
        """Return the bytes of a word, most often one that the text does not have yet, as tokens."""
        if not words or pick.random() < _FREE:
            return []
        text = self._text(taken)
        missing = [word for word in words if f'"{word}"' not in text] or words
        word = json.dumps(pick.choice(missing), ensure_ascii=False)[1:].encode(errors="replace")
        found = [self._tokens.get(bytes([byte])) for byte in word]
        return [token for token in found if token is not None] if None not in found else []

    def _choose(self, allowed: npt.NDArray[np.bool_], pick: random.Random, *, eager: bool) -> int:
        """Return a token: one that closes something, a few plain characters, or any."""
        if eager or pick.random() < _CLOSE:
            closing = next((token for token in self._closing if allowed[token]), None)
            if closing is not None:
                return closing
        for preferred in (self._short, self._plain) if eager else (self._plain, self._short):
            found = np.flatnonzero(allowed & preferred)
            if found.size:
                return int(found[pick.randrange(found.size)])
        found = np.flatnonzero(allowed)
        return int(found[pick.randrange(found.size)])

    def _text(self, taken: list[int]) -> str:
        return bytes(self._tokenizer.decode_bytes(taken)).decode(errors="replace")


_MOST_TOKENS = 400
_MOST_S = 1.0


@dataclass(slots=True)
class Soundness:
    """Counts of generated texts; `faults` has each invalid text with its schema and reason.

    A `cut` text did not end within its limits, and is not judged.
    """

    closed: bool
    texts: int = 0
    cut: int = 0
    refused: int = 0
    faults: list[tuple[str, str, str]] = field(default_factory=list)


class Generator:
    """Generates texts of schemas over one vocabulary."""

    def __init__(self) -> None:
        size = len(tokenizer())
        mask = torch.zeros((1, (size + 31) // 32), dtype=torch.int32)
        self._walker = SampleWalker(Vocabulary(tokenizer(), size), {end_token()}, mask)

    def soundness(
        self, cases: Sequence[SchemaCase], *, closed: bool, texts: int, seed: int = 0
    ) -> Soundness:
        """Return the counts for about `texts` texts, as many of each schema."""
        found = Soundness(closed)
        each = max(1, texts // max(1, len(cases)))
        for case in cases:
            try:
                grammar = grammar_of(case.schema, closed=closed)
            except RefusedSchemaError:
                found.refused += 1
                continue
            names = _property_names(case.schema)
            pick = random.Random(f"{seed} {case.name}")
            judges = list(_validators(case.schema))
            for _ in range(each):
                grammar.reset()
                text, complete = self._walker.sample(
                    grammar, pick.getrandbits(32), _MOST_TOKENS, _MOST_S, names
                )
                found.texts += complete
                found.cut += not complete
                if complete and (reason := _fault(text, judges)):
                    found.faults.append((case.name, text[:500], reason[:300]))
        return found


def soundness_of(cases: Sequence[SchemaCase], closed: bool, texts: int) -> Soundness:
    """Return the counts of a new generator."""
    return Generator().soundness(cases, closed=closed, texts=texts)


def _property_names(root: Any) -> list[str]:
    """Return the names of properties in a schema, which its texts may need."""
    names = dict.fromkeys(
        name
        for _, schema in every_schema(root)
        for keyword in ("properties", "required")
        for name in schema.get(keyword) or ()
        if isinstance(name, str)
    )
    return list(names)


def _validators(schema: Any) -> Iterator[Any]:
    """Yield names, functions that read a text, and functions that raise for an invalid value.

    The formats that llguidance follows are asserted.
    """
    exact = _exact(json.dumps(schema))
    kind = validator_for(exact, default=Draft202012Validator)
    yield "jsonschema", _exact, kind(exact, format_checker=_formats_of(kind)).validate
    # It reads drafts by `$schema`, too.
    try:
        judge = jsonschema_rs.validator_for(schema, validate_formats=False)
    except ValueError:
        # It knows no meta-schema but those of the drafts.
        return
    yield "jsonschema_rs", json.loads, judge.validate


def _formats_of(kind: Any) -> FormatChecker:
    known = kind.FORMAT_CHECKER.checkers
    found = FormatChecker(())
    found.checkers = {name: known[name] for name in FORMATS if name in known}
    return found


def _exact(text: str) -> Any:
    """Return a JSON text's value; as doubles, 4.47 is no multiple of 0.01."""
    return json.loads(text, parse_float=Decimal)


def _fault(text: str, judges: Sequence[Any]) -> str:
    """Return the reason of the first validator that refuses a text; nothing if none does."""
    try:
        json.loads(text)
    except ValueError as error:
        return f"json: {error}"
    for name, read, validate in judges:
        try:
            validate(read(text))
        except Exception as error:  # noqa: BLE001 (those of regular expressions, too)
            return f"{name}: {str(error).splitlines()[0]}"
    return ""
