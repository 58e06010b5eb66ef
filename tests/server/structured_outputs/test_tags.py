"""Structural tags: their grammar follows every schema that a response format may have."""

import json
import random
from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
from vllm.tool_parsers.structural_tag_registry import get_model_structural_tag

from server.errors import RequestError, UnknownFieldError
from server.structured_outputs.constraint import Constraint, ConstraintKind
from server.structured_outputs.custom_tools import InputReader, get_input, take_custom_tools
from server.structured_outputs.grammars import SchemaRules, tag_grammar
from server.structured_outputs.trial import TrialVerdict, do_job, job_bytes
from server.vllm.tools import rewrites_arguments
from server.wire import Endpoint
from tests.schema_corpus import BAD, BAD_IN_TAGS, GOOD
from tests.server.structured_outputs.walks import documents, faults, try_grammar, vocabulary

SPECIALS = vocabulary()[0].special_tokens()
RULES = SchemaRules(compact=False, closed=True)
ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"enum": [1, 2]}, "y": {"type": "string", "not": {"const": "no"}}},
    "dependentRequired": {"x": ["y"]},
}
"""xgrammar follows neither `not` nor `dependentRequired`."""
# By vLLM's models of tags: a call up to its arguments, and the rest of the call.
CALLS = {
    "hermes": ('<tool_call>{"name": "f", "arguments": ', "}</tool_call>"),
    "qwen_3": ('<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>"),
    "llama": ('{"name": "f", "parameters": ', "}"),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:12<|tool_call_argument_begin|>",
        "<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "deepseek_r1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n",
        "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek_v3_1": (
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
}


def grammar_of(model: str, choice: str) -> str:
    tools = [
        ChatCompletionToolsParam(function={"name": name, "parameters": ARGUMENTS, "strict": True})
        for name in ("f", "ff")
    ]
    tag = get_model_structural_tag(model, tools, choice, reasoning=False)
    assert tag is not None
    found = tag_grammar(tag.model_dump(), SPECIALS, RULES)
    assert found is not None and found.left_out == ()
    return found.text


def accepts(grammar: str, text: str, *, as_text: bool) -> bool:
    """Return True if a whole text is of the grammar; `as_text`: it has no special tokens."""
    compiler, tokenizer, _ = vocabulary()
    matcher = compiler.compile(grammar, {int(tokenizer.eos_token_id)}, in_trial=True)
    pieces = text if as_text else [text]
    tokens = [t for p in pieces for t in tokenizer(p, add_special_tokens=False).input_ids]
    tokens.append(int(tokenizer.eos_token_id))
    return matcher.validate_tokens(tokens) == tokens


@pytest.mark.parametrize("as_text", [False, True])
@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("model", CALLS)
def test_calls_follow_their_schema(model: str, choice: str, as_text: bool) -> None:
    grammar = grammar_of(model, choice)
    head, tail = CALLS[model]
    right, empty, wrong, excluded = (
        head + text + tail for text in ('{"x": 1, "y": "a"}', "{}", '{"x": 1}', '{"y": "no"}')
    )
    free = choice == "auto"
    around = free or model in ("llama", "qwen_3")
    for text, allowed in (
        (right, True),
        (empty, True),
        (wrong, False),
        (excluded, False),
        (right + wrong, False),
        (right[:-1], False),
        (head, False),
        ("", free),
        ("a < b", free),
        ("a <think> b", free and model == "hermes"),
        (f"hi {right}", free),
        (f"hi {wrong}", False),
        (f"{right} bye", around),
        (f"{right} and {right} bye", around),
        (f"{right} and {wrong}", False),
    ):
        assert accepts(grammar, text, as_text=as_text) is allowed, text


@pytest.mark.parametrize("model", CALLS)
def test_every_walk_is_a_valid_call(model: str) -> None:
    before = CALLS[model][0][-9:]
    texts = documents(grammar_of(model, "required"), 12, must_end=False)
    assert texts
    for text in texts:
        place = text.index(before) + len(before)
        _, end = json.JSONDecoder().raw_decode(text, place)
        assert faults(ARGUMENTS, text[place:end]) == []


def verdict(kind: ConstraintKind, value: Any) -> TrialVerdict:
    job = job_bytes([Constraint(kind, json.dumps(value), "")])
    return do_job(job, try_grammar, RULES, specials=SPECIALS)


def tag_of(schema: Any, **options: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema, **options}
    return {"format": {"type": "tag", "begin": "<a>", "content": content, "end": "</a>"}}


def test_a_tag_takes_what_a_response_format_takes() -> None:
    for schema in (*GOOD, *(schema for schema, _ in (*BAD, *BAD_IN_TAGS))):
        alone = verdict(ConstraintKind.JSON, schema)
        older = {"begin": "<a>", "schema": schema, "end": "</a>"}
        for tag in (tag_of(schema), {"structures": [older], "triggers": ["<a"]}):
            found = verdict(ConstraintKind.STRUCTURAL_TAG, tag)
            assert found.reason == alone.reason, schema
            assert (found.grammar is None) is (alone.grammar is None)


@pytest.mark.parametrize(
    "item",
    [
        tag_of({}, style="qwen_xml")["format"],
        tag_of({}, excludes=["<a>"])["format"],
        tag_of({}, any_order=True)["format"],
        {"type": "regex", "pattern": "a+"},
        # Text that something follows: the lexer could not find its end.
        {"type": "sequence", "elements": [{"type": "any_text"}, {"type": "const_string"}]},
        {"type": "triggered_tags", "triggers": ["aba"], "tags": [tag_of({})["format"]]},
        {"type": "triggered_tags", "triggers": ["<b"], "tags": [tag_of({})["format"]]},
        {"type": "const_string", "value": 5},
        {"type": "any_text", "max_tokens": 5},
        {"type": "any_text", "excludes": "<a>"},
        {"type": "nothing"},
        {},
    ],
    ids=str,
)
def test_other_formats_are_left_to_xgrammar(item: dict[str, Any]) -> None:
    assert tag_grammar({"format": item}, SPECIALS, RULES) is None


def test_schemas_that_xgrammar_takes_are_checked_by_its_rules() -> None:
    for schema, words in BAD_IN_TAGS:
        found = verdict(ConstraintKind.STRUCTURAL_TAG, tag_of(schema, style="qwen_xml"))
        assert words in (found.reason or ""), schema


@pytest.mark.parametrize(
    ("parser", "rewrites"),
    [
        *((name, True) for name in (None, "hermes", "llama3_json", "deepseek_v3", "deepseek_v31")),
        *((name, True) for name in ("kimi_k2", "internlm", "granite")),
        *((name, False) for name in ("qwen3_coder", "glm47", "deepseek_v32", "minimax_m2")),
        *((name, False) for name in ("hy_v4", "kimi_k3", "openai", "mistral")),
    ],
)
def test_parsers_with_json_arguments_have_them_rewritten(
    parser: str | None, rewrites: bool
) -> None:
    assert rewrites_arguments(parser) is rewrites


# ------------------------------------------------------------------------------------- custom tools
PARAMETERS = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
ALLOWED = "allowed_tools"


def refuse(path: str, _known: tuple[str, ...]) -> None:
    raise UnknownFieldError(path, param=path)


def taken(endpoint: Endpoint, body: dict[str, Any]) -> frozenset[str]:
    return take_custom_tools(endpoint, body, refuse)


def chat_tool(**fields: Any) -> dict[str, Any]:
    return {"type": "custom", "custom": {"name": "f", **fields}}


def test_a_chat_with_custom_tools() -> None:
    named = {"type": "custom", "custom": {"name": "f"}}
    call = {"id": "c", "type": "custom", "custom": {"name": "f", "input": 'a"\n'}}
    plain = {"type": "function", "function": {"name": "h"}}
    body: dict[str, Any] = {
        "tools": [chat_tool(description="d", format={"type": "text"}), chat_tool(name="g"), plain],
        "tool_choice": {"type": ALLOWED, ALLOWED: {"mode": "auto", "tools": [named, plain]}},
        "messages": [{"role": "assistant", "tool_calls": [call, plain]}],
    }
    assert taken(Endpoint.CHAT, body) == {"f", "g"}
    function = {"name": "f", "description": "d", "parameters": PARAMETERS}
    free = {"name": "g", "parameters": PARAMETERS}
    assert body["tools"][:2] == [
        {"type": "function", "function": function},
        {"type": "function", "function": free},
    ]
    stands = {"type": "function", "function": {"name": "f"}}
    assert body["tool_choice"][ALLOWED]["tools"] == [stands, plain]
    made = body["messages"][0]["tool_calls"][0]
    assert (made["id"], made["type"], made["function"]["name"]) == ("c", "function", "f")
    assert json.loads(made["function"]["arguments"]) == {"input": 'a"\n'}
    assert body["messages"][0]["tool_calls"][1] is plain


def test_a_response_with_custom_tools() -> None:
    body: dict[str, Any] = {
        "tools": [{"type": "custom", "name": "f", "format": {"type": "text"}}],
        "tool_choice": {"type": "custom", "name": "f"},
        "input": [
            {"type": "custom_tool_call", "id": None, "call_id": "c", "name": "f", "input": "x"},
            {"type": "custom_tool_call_output", "call_id": "c", "output": "y"},
        ],
    }
    assert taken(Endpoint.RESPONSES, body) == {"f"}
    assert body["tools"] == [{"type": "function", "name": "f", "parameters": PARAMETERS}]
    assert body["tool_choice"] == {"type": "function", "name": "f"}
    assert body["input"] == [
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"input": "x"}'},
        {"type": "function_call_output", "call_id": "c", "output": "y"},
    ]


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("tools", [{"type": "custom"}], "tools[0].custom"),
        ("tools", [{"type": "custom", "custom": "f"}], "tools[0].custom"),
        ("tools", [chat_tool(name=5)], "tools[0].custom.name"),
        ("tools", [chat_tool(), chat_tool()], "tools[1].custom.name"),
        ("tools", [chat_tool(formats=1)], "tools[0].custom.formats"),
        ("tools", [chat_tool(format="x")], "tools[0].custom.format"),
        ("tools", [chat_tool(format={"type": "x"})], "tools[0].custom.format.type"),
        ("tools", [chat_tool(format={"type": "text", "q": 1})], "tools[0].custom.format.q"),
        ("tools", [chat_tool(format={"type": "grammar"})], "tools[0].custom.format"),
        ("tool_choice", chat_tool(), "tool_choice.custom.name"),
        (
            "tools",
            [{"type": "namespace", "name": "n", "tools": [{"type": "custom", "name": "f"}]}],
            "tools[0].tools[0].type",
        ),
        (
            "messages",
            [{"tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}],
            "messages[0].tool_calls[0].custom.input",
        ),
    ],
)
def test_malformed_parts_are_named(field: str, value: Any, param: str) -> None:
    with pytest.raises(RequestError) as raised:
        taken(Endpoint.CHAT, {field: value})
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ('{"input": "a\\"\\\\\\n\\u00e9\\ud83d\\ude00 b"}', 'a"\\\né😀 b'),
        (' { "input" : "" } ', ""),
        ('{"input": "half\\ud83d', "half"),
        ('{"input": "x\\ud83dy"}', "x\ufffdy"),
        ('{"input": "cut\\', "cut"),
        ('{"input": "cut', "cut"),
        ('{"inp', '{"inp'),
        ('{"input": 5}', '{"input": 5}'),
        ('{"code": "a"}', '{"code": "a"}'),
        ("", ""),
    ],
)
def test_an_input_is_the_same_in_any_pieces(arguments: str, text: str) -> None:
    assert get_input(arguments) == text
    pick = random.Random(0)
    for _ in range(50):
        reader, found, rest = InputReader(), "", arguments
        while rest:
            size = pick.randint(1, 4)
            found += reader.read(rest[:size])
            rest = rest[size:]
        assert found + reader.end() == text
