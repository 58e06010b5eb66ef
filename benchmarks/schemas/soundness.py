"""Soundness by generation: texts of our grammars, judged by two validators."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import jsonschema_rs
import torch
from jsonschema import FormatChecker
from jsonschema.validators import Draft202012Validator, validator_for

from benchmarks.schemas.judging import SchemaCase
from benchmarks.schemas.samples import SampleWalker
from benchmarks.schemas.sides import RefusedSchemaError, end_token, grammar_of, tokenizer
from rbln_backend.grammar.lark import Vocabulary
from server.structured_outputs.normaliser import FORMATS
from server.structured_outputs.schema_document import every_schema

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
