"""Tools: offered, demanded, named, and their results handed back."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import jsonschema
import openai
import pydantic
import pytest
from openai.types.responses import ResponseCustomToolCall

HI: list[Any] = [{"role": "user", "content": "Switch the lamp on."}]


def closed(**properties: Any) -> dict[str, Any]:
    """An object of these properties, all of which are required, and no others."""
    required = {"required": [*properties], "additionalProperties": False}
    return {"type": "object", "properties": properties, **required}


PARAMETERS = closed(lit={"type": "boolean"}, color={"enum": ["red", "green"]})
TOOLS: list[Any] = [
    {"type": "function", "function": {"name": "switch_lamp", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "ring", "parameters": {"type": "object"}}},
]
NAMED: Any = {"type": "function", "function": {"name": "switch_lamp"}}


def ask(client: openai.OpenAI, model: str, **wish: Any) -> Any:
    wish = {"messages": HI, "tools": TOOLS, "max_tokens": 16, **wish}
    return client.chat.completions.create(model=model, **wish)


def called(client: openai.OpenAI, model: str, **wish: Any) -> Any:
    """The first choice of some seeds that ends with a call and was not cut off."""
    for seed in range(6):
        choice = ask(client, model, max_tokens=128, temperature=1.5, seed=seed, **wish).choices[0]
        if choice.finish_reason in ("stop", "tool_calls") and choice.message.tool_calls:
            return choice
    pytest.fail("no call was finished within 128 tokens, for 6 seeds")


def test_tools_may_be_left_alone(client: openai.OpenAI, model: str) -> None:
    assert ask(client, model, tool_choice="none").choices[0].message.tool_calls in (None, [])


def test_tools_are_offered(client: openai.OpenAI, model: str) -> None:
    offered = ask(client, model).usage.prompt_tokens
    assert offered > ask(client, model, tools=openai.NOT_GIVEN).usage.prompt_tokens


def test_a_named_tool_is_called_by_its_schema(client: openai.OpenAI, model: str) -> None:
    choice = called(client, model, tools=TOOLS[:1], tool_choice=NAMED)
    call = choice.message.tool_calls[0]
    assert call.type == "function"
    assert call.id
    assert call.function.name == "switch_lamp"
    jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)


def test_some_tool_is_called_when_one_is_demanded(client: openai.OpenAI, model: str) -> None:
    choice = called(client, model, tools=TOOLS[:1], tool_choice="required")
    assert choice.finish_reason == "tool_calls"
    for call in choice.message.tool_calls:
        assert call.function.name == "switch_lamp"
        jsonschema.validate(json.loads(call.function.arguments), PARAMETERS)
    assert len({call.id for call in choice.message.tool_calls}) == len(choice.message.tool_calls)


def test_a_call_is_streamed_in_pieces(client: openai.OpenAI, model: str) -> None:
    for seed in range(6):
        hot = {"stream": True, "max_tokens": 128, "temperature": 1.5, "seed": seed}
        stream = ask(client, model, tools=TOOLS[:1], tool_choice=NAMED, **hot)
        chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
        if chunks[-1].finish_reason == "length":
            continue
        pieces = [piece for chunk in chunks for piece in chunk.delta.tool_calls or []]
        assert [piece.function.name for piece in pieces if piece.function.name] == ["switch_lamp"]
        text = "".join(piece.function.arguments or "" for piece in pieces)
        jsonschema.validate(json.loads(text), PARAMETERS)
        return
    pytest.fail("no call was finished within 128 tokens, for 6 seeds")


def test_a_result_is_handed_back(client: openai.OpenAI, model: str) -> None:
    called = {"name": "switch_lamp", "arguments": '{"lit":true,"color":"red"}'}
    call = {"id": "call_1", "type": "function", "function": called}
    turns = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
    ]
    assert ask(client, model, messages=turns, tool_choice="none").choices[0].message.role


BAD = {"name": "x", "parameters": {"type": "object", "properties": {"a": {"type": "nope"}}}}


@pytest.mark.parametrize(
    "wish",
    [
        {"tool_choice": {"type": "function", "function": {"name": "no_such_tool"}}},
        {"tools": openai.NOT_GIVEN, "tool_choice": "required"},
        {"tools": [{"type": "function", "function": BAD}], "tool_choice": "required"},
    ],
    ids=["an unknown tool", "a demand without tools", "a bad schema"],
)
def test_what_cannot_be_called_is_refused(
    client: openai.OpenAI, model: str, wish: dict[str, Any]
) -> None:
    with pytest.raises(openai.BadRequestError):
        ask(client, model, **wish)


# ------------------------------------------------------------------------------------- custom tools
GREETING: list[Any] = [{"role": "user", "content": "Set the dial."}]
TOOL: Any = {"type": "custom", "custom": {"name": "dial", "format": {"type": "text"}}}
FLAT: Any = {"type": "custom", "name": "dial", "format": {"type": "text"}}
NAMED_INPUT: Any = {"type": "custom", "custom": {"name": "dial"}}
_ONE: Any = {"mode": "required", "tools": [NAMED_INPUT]}
ONLY: Any = {"type": "allowed_tools", "allowed_tools": _ONE}


@pytest.mark.parametrize("choice", [NAMED_INPUT, ONLY], ids=["named", "allowed"])
def test_a_chat_calls_it(client: openai.OpenAI, model: str, choice: Any) -> None:
    wish: Any = {"model": model, "tools": [TOOL], "tool_choice": choice, "max_tokens": 96}
    wish |= {"parallel_tool_calls": False, "seed": 1}
    whole = client.chat.completions.create(messages=GREETING, **wish).choices[0]
    call = whole.message.tool_calls[0]
    assert (call.type, call.custom.name) == ("custom", "dial")
    with client.chat.completions.create(messages=GREETING, stream=True, **wish) as stream:
        chunks = [chunk.choices[0] for chunk in stream if chunk.choices]
    pieces = [piece.to_dict() for c in chunks for piece in c.delta.tool_calls or ()]
    assert (pieces[0]["type"], pieces[0]["custom"]["name"]) == ("custom", "dial")
    assert pieces[0]["id"]
    assert len(pieces) > 1
    assert "".join(piece["custom"]["input"] for piece in pieces) == call.custom.input
    assert chunks[-1].finish_reason == whole.finish_reason
    result = {"role": "tool", "tool_call_id": call.id, "content": ""}
    turns = [*GREETING, whole.message.to_dict(), result]
    longer = client.chat.completions.create(messages=turns, model=model, max_tokens=1)
    shorter = client.chat.completions.create(messages=turns[:1], model=model, max_tokens=1)
    assert longer.usage.prompt_tokens > shorter.usage.prompt_tokens


def test_a_response_calls_it(client: openai.OpenAI, model: str) -> None:
    choice = {"type": "custom", "name": "dial"}
    wish: Any = {"model": model, "tools": [FLAT], "tool_choice": choice, "temperature": 0}
    wish |= {"max_output_tokens": 96}
    whole = client.responses.create(input=GREETING, **wish)
    (call,) = whole.output
    assert isinstance(call, ResponseCustomToolCall)
    assert call.name == "dial"
    assert isinstance(call.input, str)
    assert whole.tools[0].to_dict() == FLAT
    with client.responses.create(input=GREETING, stream=True, **wish) as stream:
        events = list(stream)
    deltas = [e.delta for e in events if e.type == "response.custom_tool_call_input.delta"]
    (done,) = [e for e in events if e.type == "response.custom_tool_call_input.done"]
    assert "".join(deltas) == done.input == call.input
    (final,) = events[-1].response.output
    assert (final.type, final.id, final.input) == ("custom_tool_call", done.item_id, call.input)
    result = {"type": "custom_tool_call_output", "call_id": call.call_id, "output": "done"}
    later = client.responses.create(
        model=model, input=[*GREETING, call.to_dict(), result], max_output_tokens=16
    )
    assert later.usage.input_tokens > whole.usage.input_tokens - 200
    stored = client.responses.create(
        model=model, previous_response_id=whole.id, input=[result], max_output_tokens=16
    )
    assert stored.usage.input_tokens == later.usage.input_tokens


def test_a_grammar_is_refused(client: openai.OpenAI, model: str) -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: /a/"}
    tool: Any = {**FLAT, "format": grammar}
    with pytest.raises(openai.BadRequestError) as raised:
        client.responses.create(model=model, input=GREETING, tools=[tool], tool_choice="required")
    assert raised.value.param == "tools[0].format"


# --------------------------------------------------------------------------------------- structured
SCHEMA_PROMPT: list[Any] = [{"role": "user", "content": "Answer in JSON."}]
SCHEMA = closed(color={"enum": ["red", "green"]}, lit={"type": "boolean"}, size={"enum": [1, 2, 3]})
HOT: dict[str, Any] = {"messages": SCHEMA_PROMPT, "max_tokens": 96, "temperature": 1.5}
PLAIN: dict[str, Any] = {"messages": SCHEMA_PROMPT, "max_tokens": 12, "temperature": 0}
FORM: dict[str, Any] = {"type": "json_schema"}
FORM |= {"json_schema": {"name": "lamp", "schema": SCHEMA, "strict": True}}


class Lamp(pydantic.BaseModel):
    color: Literal["red", "green"]
    lit: bool


def finished(client: openai.OpenAI, model: str, **wish: Any) -> str:
    """The first answer of some seeds that was not cut off, in one piece or as a stream."""
    for seed in range(6):
        answer: Any = client.chat.completions.create(model=model, seed=seed, **HOT, **wish)
        if wish.get("stream"):
            choices = [chunk.choices[0] for chunk in answer]
            text = "".join(choice.delta.content or "" for choice in choices)
        else:
            choices = answer.choices
            text = str(choices[0].message.content)
        if choices[-1].finish_reason == "stop":
            return text
    pytest.fail("no answer was finished within 96 tokens, for 6 seeds")


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_is_kept(client: openai.OpenAI, model: str, stream: bool) -> None:
    text = finished(client, model, response_format=FORM, stream=stream)
    jsonschema.validate(json.loads(text), SCHEMA)


def test_the_parse_helper_returns_the_model(client: openai.OpenAI, model: str) -> None:
    for seed in range(6):
        try:
            answer = client.chat.completions.parse(
                model=model, response_format=Lamp, seed=seed, **HOT
            )
        except openai.LengthFinishReasonError:
            continue
        assert isinstance(answer.choices[0].message.parsed, Lamp)
        return
    pytest.fail("no answer was finished within 96 tokens, for 6 seeds")


def test_json_mode_begins_with_an_object(client: openai.OpenAI, model: str) -> None:
    form: Any = {"type": "json_object"}
    wish = PLAIN | {"temperature": 1, "max_tokens": 24}
    answer = client.chat.completions.create(model=model, seed=1, response_format=form, **wish)
    assert str(answer.choices[0].message.content).lstrip()[:1] in ("{", "")


def test_text_is_the_default_form(client: openai.OpenAI, model: str) -> None:
    plain = client.chat.completions.create(model=model, **PLAIN).choices[0].message.content
    form: Any = {"type": "text"}
    text = client.chat.completions.create(model=model, response_format=form, **PLAIN)
    assert text.choices[0].message.content == plain


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "no-such-type"},
        {"type": "object", "properties": []},
        {"$ref": "#/$defs/nowhere"},
        {"type": "string", "pattern": "("},
        None,
    ],
    ids=["unknown type", "a list", "dangling reference", "broken pattern", "unknown form"],
)
def test_a_bad_schema_is_refused(client: openai.OpenAI, model: str, schema: Any) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    if schema is None:
        form = {"type": "yaml"}
    with pytest.raises(openai.BadRequestError):
        client.chat.completions.create(model=model, response_format=form, **PLAIN)


def test_constrained_and_free_answers_side_by_side(client: openai.OpenAI, model: str) -> None:
    free = {"model": model, **PLAIN}
    alone = client.chat.completions.create(**free).choices[0].message.content
    with ThreadPoolExecutor(4) as pool:
        bound = [pool.submit(finished, client, model, response_format=FORM) for _ in "ab"]
        beside = [pool.submit(client.chat.completions.create, **free) for _ in "ab"]
        for item in bound:
            jsonschema.validate(json.loads(item.result()), SCHEMA)
        assert {item.result().choices[0].message.content for item in beside} == {alone}
