"""What a call of a tool is: vLLM's parser of Hermes' form, held to objects."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser import ParserManager

from default_model.paths import CHECKPOINT
from server.structured_outputs.constraint import object_schema
from server.tools import ToolChoice
from server.vllm.parser import object_call_parser
from server.vllm.tools import allow_names, tool_parser_of

pytestmark = pytest.mark.engine

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FORCED: Any = {"type": "function", "function": {"name": "look"}}
TOKENIZER = AutoTokenizer.from_pretrained(CHECKPOINT)


def request(choice: Any, *functions: dict[str, Any]) -> ChatCompletionRequest:
    return ChatCompletionRequest(
        messages=[{"role": "user", "content": "a"}],
        tools=[{"type": "function", "function": {"name": "look", **f}} for f in functions],
        tool_choice=choice,
    )


def parser(asked: Any) -> Any:
    plain = ParserManager.get_parser(
        tool_parser_name="hermes", reasoning_parser_name=None, enable_auto_tools=True
    )
    made = object_call_parser(plain)
    assert made is not None
    return made(TOKENIZER, asked.tools)


def streamed(text: str, asked: Any, size: int = 3) -> tuple[str, list[Any]]:
    """The text and the calls of an answer that comes in pieces."""
    one = parser(asked)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    content, calls = "", dict[int, list[Any]]()
    for number, piece in enumerate(pieces):
        last = number == len(pieces) - 1
        delta = one.parse_delta(piece, [5], asked, [1], finished=last)
        if delta is not None:
            content += delta.content or ""
            indices = [found.index for found in delta.tool_calls]
            assert len(set(indices)) == len(indices), "a client looks at one piece of each call"
            for found in delta.tool_calls:
                calls.setdefault(found.index, []).append(found.function)
    names = [[f.name for f in found if f.name] for found in calls.values()]
    arguments = ["".join(f.arguments or "" for f in found) for found in calls.values()]
    return content, [[*n, a] for n, a in zip(names, arguments, strict=True)]


def whole(text: str, asked: Any) -> tuple[str, list[Any]]:
    _, content, calls = parser(asked).parse(text, asked, enable_auto_tools=True)
    return content or "", [[call.name, call.arguments] for call in calls or ()]


AUTO = request("auto", {"parameters": SCHEMA})
GOOD = '<tool_call>{"name": "look", "arguments": {"city": "Ulm"}}</tool_call>'
TEXT = '<tool_call>{"name": "look", "arguments": "Ulm"}</tool_call>'
LIST = '<tool_call>{"name": "look", "arguments": ["Ulm"]}</tool_call>'


@pytest.mark.parametrize("read", [whole, streamed])
def test_a_call_with_an_object_is_one(read: Any) -> None:
    content, calls = read("I look. " + GOOD, AUTO)
    assert content.strip() == "I look."
    assert [(name, json.loads(text)) for name, text in calls] == [("look", {"city": "Ulm"})]


@pytest.mark.parametrize("read", [whole, streamed])
@pytest.mark.parametrize("text", [TEXT, LIST, "I look. " + TEXT, TEXT + LIST])
def test_what_has_no_object_is_text_to_the_letter(read: Any, text: str) -> None:
    assert read(text, AUTO) == (text, [])


@pytest.mark.parametrize("read", [whole, streamed])
def test_a_call_beside_one_that_is_none_stays(read: Any) -> None:
    content, calls = read(GOOD + TEXT, AUTO)
    assert content == ""
    assert [name for name, _ in calls] == ["look"]


def guided(asked: Any) -> list[Any]:
    """The schemas in the structural tag that guides an answer."""
    adjusted = parser(asked).adjust_request(asked)
    assert adjusted.structured_outputs is not None
    found, level = [], [json.loads(adjusted.structured_outputs.structural_tag)]
    while level:
        value = level.pop()
        if isinstance(value, dict):
            found += [value["json_schema"]] if "json_schema" in value else []
            level += value.values()
        elif isinstance(value, list):
            level += value
    return found


@pytest.mark.parametrize("choice", ["required", FORCED])
@pytest.mark.parametrize("strict", [None, False, True])
def test_a_forced_call_is_guided_by_its_schema(choice: Any, strict: bool | None) -> None:
    schemas = guided(request(choice, {"parameters": SCHEMA, "strict": strict}))
    assert schemas
    assert all(schema == SCHEMA for schema in schemas)


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {}}])
def test_a_tool_that_says_nothing_has_an_object(parameters: Any) -> None:
    schemas = guided(request("required", {"parameters": parameters, "strict": False}))
    assert {schema["type"] for schema in schemas} == {"object"}


def test_a_free_choice_is_guided_once_a_tool_insists() -> None:
    loose = request("auto", {"parameters": SCHEMA, "strict": False})
    assert parser(loose).adjust_request(loose).structured_outputs is None
    other = {"name": "listen", "parameters": {"type": "object"}, "strict": True}
    assert SCHEMA in guided(request("auto", {"parameters": SCHEMA, "strict": False}, other))


def listed(mode: str, *names: str, **more: Any) -> ChatCompletionRequest:
    """Return a request whose answer may call some of three tools."""
    asked = ChatCompletionRequest(
        messages=[{"role": "user", "content": "a"}],
        tools=[
            {
                "type": "function",
                "function": {"name": name, "parameters": {**SCHEMA, "title": name}},
            }
            for name in ("look", "listen", "ring")
        ],
        tool_choice=mode,
        **more,
    )
    allow_names(asked, ToolChoice(mode, frozenset(names), listed=True))
    return asked


@pytest.mark.parametrize("mode", ["auto", "required"])
def test_a_list_of_tools_guides_by_those_alone(mode: str) -> None:
    asked = listed(mode, "look", "ring")
    assert {schema["title"] for schema in guided(asked)} == {"look", "ring"}
    assert asked.tools is not None
    assert [tool.function.name for tool in asked.tools] == ["look", "listen", "ring"]
    assert asked.tool_choice == mode


@pytest.mark.parametrize("read", [whole, streamed])
def test_a_call_of_a_tool_that_is_not_listed_is_text(read: Any) -> None:
    assert read(GOOD, listed("auto", "listen")) == (GOOD, [])
    other = GOOD.replace("look", "listen")
    content, calls = read(GOOD + other, listed("auto", "listen"))
    assert [name for name, _ in calls] == ["listen"]
    assert content == ""


def test_a_list_of_the_responses_api_is_known_to_parsers() -> None:
    choice = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "look"}],
    }
    asked = ResponsesRequest(
        input="a",
        tools=[{"type": "function", "name": "look", "parameters": SCHEMA}],
        tool_choice=choice,
    )
    allow_names(asked, ToolChoice.of(choice))
    assert guided(asked)
    assert asked.tool_choice.mode == "required"
    for read in (whole, streamed):
        content, calls = read(GOOD, asked)
        assert (content, [name for name, _ in calls]) == ("", ["look"])


@pytest.mark.parametrize("read", [whole, streamed])
def test_one_call_is_all_where_calls_may_not_be_parallel(read: Any) -> None:
    two = GOOD + GOOD.replace("Ulm", "Bonn")
    one = request("auto", {"parameters": SCHEMA})
    one.parallel_tool_calls = False
    assert [json.loads(text) for _, text in read(two, one)[1]] == [{"city": "Ulm"}]
    one.parallel_tool_calls = True
    assert len(read(two, one)[1]) == 2


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_grammar_ends_after_the_one_call_that_may_be(choice: str) -> None:
    asked = request(choice, {"parameters": SCHEMA, "strict": True})
    for parallel in (True, False):
        asked.parallel_tool_calls = parallel
        adjusted = parser(asked).adjust_request(asked)
        tag = json.loads(adjusted.structured_outputs.structural_tag)
        assert tag["format"]["stop_after_first"] is not parallel


def test_the_tools_themselves_stay_as_they_were_given() -> None:
    asked = request("required", {"parameters": {}, "strict": False})
    guided(asked)
    assert asked.tools is not None
    assert asked.tools[0].function.strict is False
    assert asked.tools[0].function.parameters == {}


def test_schemas_that_say_what_they_are_stay() -> None:
    for schema in (SCHEMA, {"$ref": "#/$defs/a"}, {"anyOf": [SCHEMA]}):
        assert object_schema(schema) == schema
    assert object_schema({"type": ["object", "null"]}) == {"type": "object"}


def test_a_template_shows_its_parser_or_none() -> None:
    ours = (CHECKPOINT / "chat_template.jinja").read_text(encoding="utf-8")
    qwen = '<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": <args>}\\n</tool_call>'
    assert tool_parser_of(ours) == tool_parser_of(qwen) == "hermes"
    glm = "<tool_call>{name}\\n<arg_key>{{ tool_call['arguments'] }}"
    coder = "<tool_call>\\n<function=name>{{ tool_call['arguments'] }}"
    for template in ("", "{{ messages }}", "<tool_call>", glm, coder):
        assert tool_parser_of(template) is None


def test_an_answer_without_tools_is_text_at_once() -> None:
    asked = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}])
    assert streamed(GOOD, asked) == (GOOD, [])
    assert parser(asked).parse_delta("", [5], asked, [1], finished=True) is None
