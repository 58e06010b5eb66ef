"""Inputs of custom tools: the grammar follows the client's, character by character, in JSON."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

from server.settings import ServerSettings
from server.structured_outputs.constraint import (
    Constraint,
    ConstraintKind,
    SchemaLimits,
    UnusableError,
)
from server.structured_outputs.tool_inputs.common_terminals import COMMON_TERMINALS
from server.structured_outputs.tool_inputs.input_grammar import (
    InputGrammar,
    grammar_of,
    input_schema,
)
from server.structured_outputs.tool_inputs.json_text import json_regex
from server.structured_outputs.trial_job import TrialVerdict, do_job, job_bytes
from tests.server.structured_outputs.walks import accepts, documents, vocabulary

CALCULATION = r"""
start: term (SP OP SP term)~1..2   // spaces are required
term: INT | "(" start ")" | STR
SP: " "
OP: "+" | "\\" | /[\/"]/
STR: /'[^'\n]*'/
%import common.INT
"""
QUERY = 'start: "select"i NAME ("," NAME)* ";"\nNAME: "a".."z"+\n%ignore /[ \\n]+/'


@pytest.mark.parametrize(
    ("syntax", "definition", "right", "wrong"),
    [
        (
            "lark",
            CALCULATION,
            ["1 + 2", "(1 \\ 2) \" 'é\t\\\"'", "3 / 4 / 5"],
            ["1+2", "1", "'a\nb' + 1", " 1 + 2", "1 + 2 + 3 + 4"],
        ),
        ("lark", QUERY, ["SELECT a , b\n;", "select a;"], ["select A;", "select a", "s elect a;"]),
        (
            "regex",
            r'^(?P<y>\d{4})-(?:\x20|\n)[^a-z\]]\w"\\\.$',
            ['2020- B_"\\.', '2020-\n\\9"\\.', '2020-\n\t9"\\.'],
            ['2020- a_"\\.', '2020-]_"\\.', '2020- B_"\\.x', "2020- Bx\\."],
        ),
        ("regex", "(?is:a.)|b.", ["A\n", "a\\", "b "], ["b\n", "B "]),
        ("regex", r"[\s\S]{2}\p{Lu}?[]\-]", ['"\\Ä]', "\n\n-"], ["aaä]", "aa"]),
    ],
)
def test_texts_of_a_grammar(
    syntax: str, definition: str, right: list[str], wrong: list[str]
) -> None:
    grammar = InputGrammar(syntax, definition).text()
    for text in right:
        assert accepts(grammar, json.dumps(text, ensure_ascii=False)), text
    for text in wrong:
        assert not accepts(grammar, json.dumps(text, ensure_ascii=False)), text


@pytest.mark.parametrize("pattern", [r"[^\w]{3}", r'(\\|"|\n|.)*x', r"[!-~]{2,9}\S"])
def test_every_text_is_json_of_a_match(pattern: str) -> None:
    for text in documents(InputGrammar("regex", pattern).text(), 40):
        assert re.fullmatch(pattern, json.loads(text)), text


def test_an_expression_matches_the_json_of_its_texts() -> None:
    pick = random.Random(3)
    alphabet = 'ab"\\\n\t.-\u00e9'
    for _ in range(300):
        members = "".join(re.escape(c) for c in pick.sample(alphabet, 3))
        pattern = f"[{pick.choice(['', '^'])}{members}]"
        # Python's `re` knows no intersection; both describe one character here.
        plain = re.sub(r"\[(\[.*\])&&(.*?)\](?=\||$|\))", r"(?=\2)\1", json_regex(pattern))
        plain = re.sub(r"\\x\{([0-9a-f]+)\}", lambda m: f"\\u{int(m[1], 16):04x}", plain)
        for text in alphabet:
            spelled = json.dumps(text, ensure_ascii=False)[1:-1]
            matched = re.fullmatch(plain, spelled) is not None
            assert matched is (re.fullmatch(pattern, text) is not None), (pattern, text, plain)


@pytest.mark.parametrize(
    ("syntax", "definition", "reason"),
    [
        ("regex", r"\bfoo", r"'\\b' is not supported, at character 3"),
        ("regex", "a(?=b)", "a group of this kind is not supported"),
        ("regex", "[a[b]]", "classes within classes"),
        ("regex", "a^b", "an anchor inside of a pattern"),
        ("regex", "(?x:a)", "a group of this kind"),
        ("regex", "[a", "the class at character 1 of a pattern has no end"),
        ("regex", "a)", "no group begins before"),
        ("regex", "(a", "has no end"),
        ("regex", "[z-a]", "the range of characters"),
        ("regex", r"\x{d800}", "which is no character"),
        ("lark", "start: %json {}", "line 1: '%json': only '%import common'"),
        ("lark", "start: <eos>", "special tokens"),
        ("lark", 'start: A\nA: ~"x"', "line 2: '~'"),
        ("lark", 'start: "abc', "line 1: a string has no end"),
        ("lark", "%import python.X", "only terminals of 'common'"),
        ("lark", "%import common.X", "'common' has no terminal 'X'; it has DIGIT"),
        ("lark", "start[lazy]: /a/", "options of rules"),
        ("lark", "start: /a/x", "the flags 'x'"),
        ("lark", 'start: "b".."a"', "a range is between"),
    ],
)
def test_parts_without_a_translation(syntax: str, definition: str, reason: str) -> None:
    with pytest.raises(UnusableError, match=re.escape(reason).replace(r"\\\\", r"\\")):
        InputGrammar(syntax, definition).text()


def test_common_terminals_are_expressions() -> None:
    imports = "".join(f"%import common.{name} -> T{name}\n" for name in COMMON_TERMINALS)
    names = " | ".join(f"T{name}" for name in COMMON_TERMINALS)
    grammar = InputGrammar("lark", f"{imports}start: {names}").text()
    for text in ("-7", "1.5e3", '"a\\"b"', "/* * */", "x_1", "\r\n", "-- x", "ff"):
        assert accepts(grammar, json.dumps(text)), text
    assert not accepts(grammar, json.dumps("/* */ */"))


def verdict(kind: ConstraintKind, value: Any) -> TrialVerdict:
    limits = SchemaLimits.of(ServerSettings())
    constraint = Constraint(kind, json.dumps(value), "tools", exact=False, derived=True)
    job = job_bytes([constraint], limits)
    specials = vocabulary()[0].special_tokens()
    return do_job(job, lambda _kind, _text: [], compact=False, specials=specials)


def tools_of(grammar: InputGrammar) -> list[ChatCompletionToolsParam]:
    schemas = {"calc": input_schema(grammar), "other": {"type": "object", "properties": {}}}
    return [
        ChatCompletionToolsParam(function={"name": name, "parameters": schema, "strict": True})
        for name, schema in schemas.items()
    ]


@pytest.mark.engine
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_a_grammar_has_its_place_among_all_calls(choice: str) -> None:
    tools = tools_of(InputGrammar("lark", CALCULATION))
    tag = get_model_structural_tag("hermes", tools, choice, reasoning=False)
    assert tag is not None
    found = verdict(ConstraintKind.STRUCTURAL_TAG, tag.model_dump())
    assert found.grammar is not None, found.reason
    head, tail = '<tool_call>{"name": "calc", "arguments": {"input": ', "}}</tool_call>"
    for text, right in (("1 + 2", True), ("'\"' \\ 2", True), ("1+2", False), ("hello", False)):
        call = f"{head}{json.dumps(text)}{tail}"
        assert accepts(found.grammar, call) is right, text
        assert accepts(found.grammar, f"A word first. {call}") is (right and choice == "auto")


def test_a_form_without_a_rewriting_takes_no_grammar() -> None:
    schema = input_schema(InputGrammar("regex", "a+"))
    content = {"type": "json_schema", "json_schema": schema, "style": "qwen_xml"}
    tag = {"format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}
    assert "has no rewriting" in str(verdict(ConstraintKind.STRUCTURAL_TAG, tag).reason)
    assert verdict(ConstraintKind.JSON, schema).grammar is not None


@pytest.mark.parametrize(
    "schema", [{}, [], None, {"properties": {"input": {"x-input-grammar": 5}}}, input_schema(None)]
)
def test_other_schemas_have_no_grammar(schema: Any) -> None:
    assert grammar_of(schema) is None
    grammar = InputGrammar("lark", "start: /a/")
    assert grammar_of({**input_schema(grammar), "title": "a"}) is None
    assert grammar_of(input_schema(grammar)) == grammar
