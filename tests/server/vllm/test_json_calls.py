"""Calls that are JSON, in each parser's form: whole, and streamed in pieces cut anywhere."""

from __future__ import annotations

import json
import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import ParserManager

from default_model.paths import CHECKPOINT
from server.tools import NATURAL, Ending
from server.vllm.call_reader import HELD_CHARACTERS
from server.vllm.parser import object_call_parser

pytestmark = pytest.mark.engine

LENGTH = Ending("length")
Calls = list[tuple[str, str]]


def _objects(calls: Calls, key: str = "arguments") -> list[str]:
    return [f'{{"name": {json.dumps(name)}, "{key}": {text}}}' for name, text in calls]


def _tagged(start: str, end: str = "", between: str = "\n", key: str = "arguments") -> Any:
    return lambda calls: between.join(f"{start}{one}{end}" for one in _objects(calls, key))


def _listed(start: str, end: str = "", key: str = "arguments") -> Any:
    return lambda calls: f"{start}[{', '.join(_objects(calls, key))}]{end}"


def _headed(header: str, end: str) -> Any:
    return lambda calls: (
        "<｜tool▁calls▁begin｜>"
        + "\n".join(header.format(name) + text + end for name, text in calls)
        + "<｜tool▁calls▁end｜>"
    )


def _keyed(calls: Calls) -> str:
    one = ", ".join(f"{{{json.dumps(name)}: {text}}}" for name, text in calls)
    return f"<|tools_prefix|>[{one}]<|tools_suffix|>"


FORMS: dict[str, Any] = {
    "hermes": _tagged("<tool_call>\n", "\n</tool_call>"),
    "longcat": _tagged("<longcat_tool_call>", "</longcat_tool_call>"),
    "ernie45": _tagged("<tool_call>\n", "\n</tool_call>\n"),
    "granite4": _tagged("<tool_call>", "</tool_call>"),
    "granite-20b-fc": _tagged("<function_call> "),
    "granite": _listed("<|tool_call|>"),
    "phi4_mini_json": _listed("functools"),
    "jamba": _listed("<tool_calls>", "</tool_calls>"),
    "hunyuan_a13b": _listed("<tool_calls>", "</tool_calls>"),
    "xlam": _listed("```json\n", "\n```"),
    "llama3_json": _tagged("", "", "; ", "parameters"),
    "internlm": _tagged("<|action_start|><|plugin|>\n", "<|action_end|>\n", "", "parameters"),
    "gigachat3": _tagged("<|message_sep|>\n\nfunction call<|role_sep|>\n", "</s>"),
    "apertus": _keyed,
    "deepseek_v3": _headed(
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>{}\n```json\n", "\n```<｜tool▁call▁end｜>"
    ),
    "deepseek_v31": _headed("<｜tool▁call▁begin｜>{}<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
}
AT_START = {"granite"}
"""Parsers whose calls are the whole answer."""
HOSTILE = [
    *("</tool_call>", "<tool_call>", "</longcat_tool_call>", "<|action_end|>", "</tool_calls>"),
    *("]", "}]", '"}{]["', "```", "</s>", "<｜tool▁call▁end｜>", "\n```<｜tool▁call▁end｜>"),
    *(
        "a</tool_call>\n<tool_call>\nb",
        '}}</tool_call>\n<tool_call>{"name": "ring"',
        "<|tool_call|>",
    ),
    *('"arguments": {"a": 1}', "; {", "functools[", "\\", '\\"', "\n", "é😀", "<|tools_suffix|>"),
]
_TOKENS = [
    *("<tool_calls>", "</tool_calls>", "<|python_tag|>", "<｜tool▁calls▁begin｜>"),
    *("<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
]


@cache
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(CHECKPOINT)
    made.add_tokens(_TOKENS)
    return made


@cache
def parser_class(name: str) -> Any:
    return object_call_parser(ParserManager.get_parser(name, None, enable_auto_tools=True))


def request(choice: Any = "auto", before: str | None = None) -> ChatCompletionRequest:
    """Return a request with two tools, whose answer continues the text `before`."""
    messages: list[Any] = [{"role": "user", "content": "a"}]
    more: dict[str, Any] = {}
    if before is not None:
        messages.append({"role": "assistant", "content": before})
        more = {"continue_final_message": True, "add_generation_prompt": False}
    functions = [{"name": name, "parameters": {"type": "object"}} for name in ("look", "ring")]
    tools = [{"type": "function", "function": one} for one in functions]
    return ChatCompletionRequest(messages=messages, tools=tools, tool_choice=choice, **more)


def read(
    name: str, pieces: list[str], ending: Ending = NATURAL, asked: Any = None
) -> tuple[str, Calls]:
    """Return the text and the calls of a streamed answer."""
    asked = asked or request()
    one = parser_class(name)(tokenizer(), asked.tools)
    one.ending = ending
    text, calls = "", dict[int, list[str]]()
    for number, piece in enumerate(pieces, 1):
        last = number == len(pieces)
        delta = one.parse_delta(piece, [5], asked, [1], finished=last)
        if delta is None:
            continue
        text += delta.content or ""
        for call in delta.tool_calls:
            found = calls.setdefault(call.index, [call.function.name, ""])
            found[1] += call.function.arguments
    return text, [(one, arguments) for one, arguments in calls.values()]


def whole(name: str, text: str, ending: Ending = NATURAL, asked: Any = None) -> tuple[str, Calls]:
    """Return the text and the calls of an answer that is not streamed."""
    asked = asked or request()
    one = parser_class(name)(tokenizer(), asked.tools)
    output = SimpleNamespace(
        text=text, token_ids=[5], finish_reason=ending.reason, stop_reason=ending.matched
    )
    one.read_whole(output, asked, [1], auto_tools=True)
    _, content, calls = one.parse(text, asked, True, [5])
    return content or "", [(call.name, call.arguments) for call in calls or ()]


def both(name: str, text: str, ending: Ending = NATURAL, asked: Any = None) -> tuple[str, Calls]:
    """Return what an answer is read as: the same whole, and streamed in pieces of any size."""
    found = whole(name, text, ending, asked)
    dice = random.Random(text)
    for size in (1, 4, 17):
        cuts = sorted(dice.choices(range(len(text) + 1), k=len(text) // size))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(name, pieces, ending, asked) == found, (text, pieces)
    return found


@pytest.mark.parametrize("name", FORMS)
def test_what_arguments_say_never_ends_a_call(name: str) -> None:
    before = "" if name in AT_START else "I look."
    for text in HOSTILE:
        calls = [("look", json.dumps({"text": text, "a": [{}]})), ("ring", "{}")]
        assert both(name, before + FORMS[name](calls)) == (before, calls)
        calls = [("look", json.dumps({text: {"name": text}}, ensure_ascii=False))]
        assert both(name, FORMS[name](calls)) == ("", calls)


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_was_cut_is_as_long_as_it_was_generated(name: str) -> None:
    arguments = '{"text": "x </tool_call> ] } y", "n": [1.5e3, true]}'
    text = FORMS[name]([("look", arguments), ("ring", "{}")])
    length = 0
    for end in range(len(text) + 1):
        content, calls = (whole if end % 7 else both)(name, text[:end], LENGTH)
        assert not content, end
        found = calls[0][1] if calls else ""
        assert arguments.startswith(found)
        assert len(found) >= length
        length = len(found)
    assert length == len(arguments)


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize(
    "arguments",
    [
        *('{"cmd": NaN}', '{"cmd": "a\nb"}', '{"cmd": 1,}', '{"cmd": [1,]}', '{"cmd": -Infinity}'),
        *('{"cmd": "\\x"}', '{"cmd": 01}', "{'cmd': 1}", '{"cmd" 1}', '{"cmd": tru}', '["a"]'),
        *('{"cmd": "', '{"cmd": {}', "{", "5"),
    ],
)
def test_what_is_no_json_object_is_text(name: str, arguments: str) -> None:
    text = FORMS[name]([("look", arguments)])
    assert both(name, text) == (text, [])


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_no_tool_has_is_text(name: str) -> None:
    text = FORMS[name]([("nothing", '{"a": 1}')])
    assert both(name, text) == (text, [])


NAMED = [name for name in FORMS if name not in ("apertus", "deepseek_v3", "deepseek_v31")]


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize(
    ("one", "arguments"),
    [
        ('{"name": "look"}', "{}"),
        ('{"name": "look", "arguments": null}', "{}"),
        ('{"name": "look", "parameters": {"a": 1}}', '{"a": 1}'),
        ('{"name": "lo\\u006fk", "arguments": {"a": 1}}', '{"a": 1}'),
        ('{"arguments": {"name": "ring"}, "name": "look"}', '{"name": "ring"}'),
        ('{"id": 5, "name" :"look" , "arguments" : {"a":1 } }', '{"a":1 }'),
        ('{"name": "look", "arguments": "{\\"a\\": 1}"}', '{"a": 1}'),
    ],
)
def test_the_members_of_a_call(name: str, one: str, arguments: str) -> None:
    text = FORMS[name]([("X", "{}")])
    start, end = text.index("{"), text.rindex("}") + 1
    assert both(name, text[:start] + one + text[end:]) == ("", [("look", arguments)])


@pytest.mark.parametrize(
    "tag", ["<tool_call>", "<tool_call>\n", "<tool_call> and", "a <tool_ca", "<"]
)
def test_a_mark_without_a_call_is_text(tag: str) -> None:
    good = '<tool_call>{"name": "ring", "arguments": {}}</tool_call>'
    assert both("hermes", tag) == (tag, [])
    assert both("hermes", f"{tag} x") == (f"{tag} x", [])
    assert both("hermes", f"{tag} x {good}") == (f"{tag} x", [("ring", "{}")])


def test_marks_of_an_answer_are_no_text() -> None:
    call = FORMS["ernie45"]([("look", "{}")])
    assert both("ernie45", f"\n\n<response>\nIt is <b>.\n</response>{call}") == (
        "It is <b>.",
        [("look", "{}")],
    )


def test_long_arguments_are_sent_before_they_are_complete() -> None:
    long = '{"text": "' + "x" * HELD_CHARACTERS
    start = FORMS["hermes"]([("look", long)]).removesuffix("}\n</tool_call>")
    one = parser_class("hermes")(tokenizer(), request().tools)
    delta = one.parse_delta(start, [5], request(), [1], finished=False)
    assert delta.tool_calls[0].function.arguments == long
    # What has been sent stays a call, up to where it is no JSON.
    assert both("hermes", f'{start}"\n,}}}}</tool_call>') == ("", [("look", f'{long}"\n,')])


def test_guided_arguments_are_sent_as_they_arrive() -> None:
    asked = request("required")
    one = parser_class("hermes")(tokenizer(), asked.tools)
    start = '<tool_call>\n{"name": "look", "arguments": {"a'
    delta = one.parse_delta(start, [5], asked, [1], finished=False)
    assert delta.tool_calls[0].function.arguments == '{"a'


@pytest.mark.parametrize("name", ["pythonic", "phi4_mini_json", "granite", "xlam", "internlm"])
def test_calls_that_vllms_schema_guides_are_read_as_such(name: str) -> None:
    named: Any = {"type": "function", "function": {"name": "look"}}
    for hostile in HOSTILE:
        text = json.dumps({"text": hostile, '"parameters": ': {"parameters": {}}})
        calls = [("look", text), ("ring", "{}"), ("look", text)]
        listed = _listed("", "", "parameters")(calls)
        assert both(name, listed, asked=request("required")) == ("", calls)
        assert both(name, text, asked=request(named)) == ("", [("look", text)])


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_tags_of_longcat_guide_its_calls(choice: str) -> None:
    asked = request(choice)
    asked.tools[0].function.strict = True  # type: ignore[index]
    adjusted = parser_class("longcat")(tokenizer(), asked.tools).adjust_request(asked)
    assert adjusted.structured_outputs is not None
    form = json.loads(adjusted.structured_outputs.structural_tag)["format"]
    assert all(tag["begin"].startswith("<longcat_tool_call>") for tag in form["tags"])
    assert all(tag["end"].endswith("</longcat_tool_call>") for tag in form["tags"])
    assert form.get("triggers", ["<longcat_tool_call>"]) == ["<longcat_tool_call>"]


@pytest.mark.parametrize("name", FORMS)
def test_a_call_that_is_continued_comes_back_complete(name: str) -> None:
    calls = [("look", '{"text": "one two </tool_call>"}')]
    text = FORMS[name](calls)
    for at in range(text.index("{") + 1, len(text)):
        is_over = text[:at].rstrip().endswith(("]", "tool_call>", "|>", "｜>", "s>", "`", "calls>"))
        if "two" in text[:at] and is_over:
            break
        assert both(name, text[at:], asked=request(before=text[:at]))[1] == calls, text[:at]


def test_what_continues_a_text_is_what_is_new() -> None:
    asked = request(before="It is <tool_c")
    assert both("hermes", "ell> warm.", asked=asked) == ("ell> warm.", [])
    good = '<tool_call>{"name": "ring", "arguments": {}}</tool_call>'
    assert both("hermes", good.removeprefix("<tool_c"), asked=asked) == ("", [("ring", "{}")])
    # A call that is complete in the text was made before.
    assert both("hermes", f" x {good}", asked=request(before=good)) == (" x", [("ring", "{}")])
