"""Names and values that a schema excludes stay excluded, however JSON spells them."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.rewriting import rewrite
from tests.schema_instances import InstanceGenerator
from tests.server.structured_outputs.walks import accepts, documents, faults

ODD = (
    *("", "a", '"', "\\", 'a"b', "a\\b", "\\\\", '\\"', "a/b", "/", "\n", "\t", "\x00", "\x01"),
    *("\x1f", "\x7f", "a\x00", "é", "😀", "\u2028", "\ufffd", "a\nb", "'", "u0022", "\\u0022"),
)
"""Texts that JSON escapes, may escape, or that look as if they were escaped."""


def excluding(text: str) -> dict[str, Any]:
    """Return schemas, by the text that each must not hold for its sake."""
    name, value = json.dumps(text), {"type": "string", "not": {"enum": [text]}}
    wrong = f'{{{name}: "x"}}'
    return {
        wrong: {"properties": {text: {"type": "integer"}}, "additionalProperties": True},
        f" {wrong}": {"type": "object", "not": {"required": [text]}},
        f"  {wrong}": {"type": "object", "dependentRequired": {text: ["c"]}},
        f"{{{name}: 1}}": {"type": "object", "dependentSchemas": {text: {"required": ["c"]}}},
        f" {{{name}: 1}}": {"type": "object", "propertyNames": value},
        name: value,
        f" {name}": {"oneOf": [{"type": "string"}, {"const": text}]},
        f"[{name}]": {"items": {"type": "string"}, "not": {"contains": {"const": text}}},
    }  # fmt: skip


@pytest.mark.parametrize("text", ODD, ids=ascii)
def test_an_excluded_text_is_in_no_spelling(text: str) -> None:
    for wrong, schema in excluding(text).items():
        grammar = rewrite(schema, compact=False).grammar
        assert not accepts(grammar, wrong.strip()), schema
        near = InstanceGenerator(schema, seed=1).near([wrong], 60)
        taken = [near_text for near_text in near if accepts(grammar, near_text)]
        assert [t for t in taken if faults(schema, t)] == []
        # Another text is still taken.
        assert accepts(grammar, wrong.strip().replace(json.dumps(text), '"other"')), schema


CLASSES = (
    *(
        '[^"]',
        "[^\\\\]",
        '[^"\\\\]',
        "[^a]",
        '[^a"]',
        "[\\x00-\\x1f]",
        "[\\x00-\\x1fa]",
        "[\\x00-!]",
    ),
    *(
        '[\\x00-"]',
        "[\\x00-\\\\]",
        "[#-\\U0010ffff\\x00-!]",
        "[^\\x00]",
        "\\W",
        "[^\\w]",
        '[^\\w"]',
    ),
    *(
        "\\S",
        "[^\\s\\\\]",
        "\\D",
        "[^\\D]",
        ".",
        "[^.]",
        '(?:[^"]|a)',
        '(?:[^"]|\\x00)',
        "(?:a|[^\\\\])",
    ),
    *(
        '(?:[^"]|[^\\\\])',
        "[\\s\\S]",
        '(?:[\\x01-\\x1f]|\\x00|[^"])',
        '"',
        "\\\\",
        "\\x7f",
    ),
)
CHARACTERS = [chr(point) for point in range(0x81)] + ["é", "\u2028", "\uffff", "😀"]


@pytest.mark.parametrize("pattern", CLASSES)
def test_a_class_has_its_characters_and_no_others(pattern: str) -> None:
    grammar = rewrite({"type": "string", "pattern": f"^{pattern}$"}, compact=False).grammar
    expected = [c for c in CHARACTERS if re.fullmatch(pattern, c)]
    # JSON text of the backend's has DEL escaped.
    found = [c for c in CHARACTERS if accepts(grammar, json.dumps(c, ensure_ascii=c == "\x7f"))]
    assert set(found) <= set(expected)
    # NUL is left out of classes without a quote or a backslash, and what only Python has in them.
    assert set(expected) - set(found) <= {"\x00", *"\r\u2028\x1c\x1d\x1e\x1f", "é"}


def patterns(seed: int, count: int) -> list[str]:
    """Make regular expressions of the classes above."""
    pick = random.Random(seed)

    def part(depth: int) -> str:
        if depth and pick.random() < 0.3:
            return f"(?:{part(depth - 1)}|{part(depth - 1)})"
        atoms = (pick.choice(CLASSES) for _ in range(pick.randint(1, 3)))
        return "".join(atom + pick.choice(("", "", "*", "?", "{1,2}")) for atom in atoms)

    ends = (("", ""), ("^", ""), ("", "$"), ("^", "$"))
    return [part(2).join(pick.choice(ends)) for _ in range(count)]


@pytest.mark.parametrize("pattern", patterns(seed=1, count=40))
def test_every_text_of_a_pattern_matches_it(pattern: str) -> None:
    schema = {"type": "string", "pattern": pattern}
    try:
        grammar = rewrite(schema, compact=False).grammar
    except UnusableError as error:
        assert "no value" in str(error)
        return
    pick = random.Random(pattern)
    texts = ["".join(pick.choices(CHARACTERS, k=pick.randint(0, 4))) for _ in range(20)]
    taken = [text for text in texts if accepts(grammar, json.dumps(text, ensure_ascii=False))]
    walked = [json.loads(text) for text in documents(grammar, 3, must_end=False)]
    assert [text for text in [*taken, *walked] if not re.search(pattern, text)] == []
