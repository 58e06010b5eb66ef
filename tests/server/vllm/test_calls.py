"""Calls that are JSON, in each parser's form: whole, and streamed in pieces cut anywhere."""

import json
import random
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.parser import ParserManager

from default_model.paths import CHECKPOINT
from server.structured_outputs.constraint import object_schema
from server.tools import NATURAL, Ending, ToolChoice, finish_reason, is_whole
from server.vllm.call_reader import HELD_CHARACTERS
from server.vllm.parser import object_call_parser
from server.vllm.tools import allow_names, get_tool_parser_name
from tests.server.vllm.call_forms import (
    ARGUMENTS,
    CODER,
    FORMS,
    HERMES,
    OTHER,
    Form,
    reader,
    request,
)

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


JSON_FORMS: dict[str, Any] = {
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
    *"</tool_call> <tool_call> </longcat_tool_call> <|action_end|> </tool_calls>".split(),
    "]",
    "}]",
    '"}{]["',
    "```",
    "</s>",
    "<｜tool▁call▁end｜>",
    "\n```<｜tool▁call▁end｜>",
    "a</tool_call>\n<tool_call>\nb",
    '}}</tool_call>\n<tool_call>{"name": "ring"',
    "<|tool_call|>",
    '"arguments": {"a": 1}',
    "; {",
    "functools[",
    "\\",
    '\\"',
    "\n",
    "é😀",
    "<|tools_suffix|>",
]
_TOKENS = [
    *"<tool_calls> </tool_calls> <|python_tag|> <｜tool▁calls▁begin｜>".split(),
    *"<｜tool▁calls▁end｜> <｜tool▁call▁begin｜> <｜tool▁call▁end｜>".split(),
]


@cache
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(CHECKPOINT)
    made.add_tokens(_TOKENS)
    return made


@cache
def parser_class(name: str) -> Any:
    return object_call_parser(ParserManager.get_parser(name, None, enable_auto_tools=True))


def json_request(choice: Any = "auto", before: str | None = None) -> ChatCompletionRequest:
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
    asked = asked or json_request()
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
    asked = asked or json_request()
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
    for size in (2, 17):
        cuts = sorted(dice.choices(range(len(text) + 1), k=len(text) // size))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(name, pieces, ending, asked) == found, (text, pieces)
    return found


@pytest.mark.parametrize("name", JSON_FORMS)
def test_what_arguments_say_never_ends_a_call(name: str) -> None:
    before = "" if name in AT_START else "I look."
    for text in HOSTILE:
        calls = [("look", json.dumps({"text": text, "a": [{}]})), ("ring", "{}")]
        assert both(name, before + JSON_FORMS[name](calls)) == (before, calls)
        calls = [("look", json.dumps({text: {"name": text}}, ensure_ascii=False))]
        assert both(name, JSON_FORMS[name](calls)) == ("", calls)


STEPS = [3, pytest.param(1, marks=pytest.mark.wide)]
"""Answers are cut behind each third character or token, and in the wide run behind each."""


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", JSON_FORMS)
def test_a_call_that_was_cut_is_as_long_as_it_was_generated(name: str, step: int) -> None:
    arguments = '{"text": "x </tool_call> ] } y", "n": [1.5e3, true]}'
    text = JSON_FORMS[name]([("look", arguments), ("ring", "{}")])
    length = 0
    for end in (*range(0, len(text), step), len(text)):
        content, calls = (whole if end % 7 else both)(name, text[:end], LENGTH)
        assert not content, end
        found = calls[0][1] if calls else ""
        assert arguments.startswith(found)
        assert len(found) >= length
        length = len(found)
    assert length == len(arguments)


NO_OBJECTS = [
    '{"cmd": NaN}',
    '{"cmd": "a\nb"}',
    '{"cmd": 1,}',
    '{"cmd": [1,]}',
    '{"cmd": -Infinity}',
    '{"cmd": "\\x"}',
    '{"cmd": 01}',
    "{'cmd': 1}",
    '{"cmd" 1}',
    '{"cmd": tru}',
    '["a"]',
    '{"cmd": "',
    '{"cmd": {}',
    "{",
    "5",
]


@pytest.mark.parametrize("name", JSON_FORMS)
def test_what_is_no_json_object_is_text(name: str) -> None:
    for arguments in NO_OBJECTS:
        text = JSON_FORMS[name]([("look", arguments)])
        assert both(name, text) == (text, [])


@pytest.mark.parametrize("name", JSON_FORMS)
def test_a_call_that_no_tool_has_is_text(name: str) -> None:
    text = JSON_FORMS[name]([("nothing", '{"a": 1}')])
    assert both(name, text) == (text, [])


NAMED = [name for name in JSON_FORMS if name not in ("apertus", "deepseek_v3", "deepseek_v31")]


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
    text = JSON_FORMS[name]([("X", "{}")])
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
    call = JSON_FORMS["ernie45"]([("look", "{}")])
    assert both("ernie45", f"\n\n<response>\nIt is <b>.\n</response>{call}") == (
        "It is <b>.",
        [("look", "{}")],
    )


def test_long_arguments_are_sent_before_they_are_complete() -> None:
    long = '{"text": "' + "x" * HELD_CHARACTERS
    start = JSON_FORMS["hermes"]([("look", long)]).removesuffix("}\n</tool_call>")
    one = parser_class("hermes")(tokenizer(), json_request().tools)
    delta = one.parse_delta(start, [5], json_request(), [1], finished=False)
    assert delta.tool_calls[0].function.arguments == long
    # What has been sent stays a call, up to where it is no JSON.
    assert both("hermes", f'{start}"\n,}}}}</tool_call>') == ("", [("look", f'{long}"\n,')])


def test_guided_arguments_are_sent_as_they_arrive() -> None:
    asked = json_request("required")
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
        assert both(name, listed, asked=json_request("required")) == ("", calls)
        assert both(name, text, asked=json_request(named)) == ("", [("look", text)])


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_tags_of_longcat_guide_its_calls(choice: str) -> None:
    asked = json_request(choice)
    asked.tools[0].function.strict = True  # type: ignore[index]
    adjusted = parser_class("longcat")(tokenizer(), asked.tools).adjust_request(asked)
    assert adjusted.structured_outputs is not None
    form = json.loads(adjusted.structured_outputs.structural_tag)["format"]
    assert all(tag["begin"].startswith("<longcat_tool_call>") for tag in form["tags"])
    assert all(tag["end"].endswith("</longcat_tool_call>") for tag in form["tags"])
    assert form.get("triggers", ["<longcat_tool_call>"]) == ["<longcat_tool_call>"]


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", JSON_FORMS)
def test_a_call_that_is_continued_comes_back_complete(name: str, step: int) -> None:
    calls = [("look", '{"text": "one two </tool_call>"}')]
    text = JSON_FORMS[name](calls)
    for at in range(text.index("{") + 1, len(text), step):
        is_over = text[:at].rstrip().endswith(("]", "tool_call>", "|>", "｜>", "s>", "`", "calls>"))
        if "two" in text[:at] and is_over:
            break
        assert both(name, text[at:], asked=json_request(before=text[:at]))[1] == calls, text[:at]


def test_what_continues_a_text_is_what_is_new() -> None:
    asked = json_request(before="It is <tool_c")
    assert both("hermes", "ell> warm.", asked=asked) == ("ell> warm.", [])
    good = '<tool_call>{"name": "ring", "arguments": {}}</tool_call>'
    assert both("hermes", good.removeprefix("<tool_c"), asked=asked) == ("", [("ring", "{}")])
    # A call that is complete in the text was made before.
    assert both("hermes", f" x {good}", asked=json_request(before=good)) == (" x", [("ring", "{}")])


# ---------------------------------------------------------------------------------------- cut calls
CALLS = [("look", ARGUMENTS), ("ring", OTHER)]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_an_answer_that_ended_by_itself_has_all_of_it(form: Form) -> None:
    one = reader(form)
    for parts in (one.streamed(len(one.ids)), one.whole(len(one.ids))):
        assert parts == (form.thought, form.said, CALLS)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("form", "ending"),
    [
        *((form, LENGTH) for form in FORMS),
        *((form, Ending("stop", "x")) for form in (HERMES, CODER)),
        (HERMES, Ending("content_filter")),
    ],
    ids=str,
)
def test_a_cut_call_is_as_long_as_it_was_generated(form: Form, ending: Ending, step: int) -> None:
    one = reader(form)
    for end in (*range(1, len(one.ids), step), len(one.ids)):
        reasoning, content, calls = one.streamed(end, ending)
        assert one.whole(end, ending) == (reasoning, content, calls), end
        assert (form.thought or "").startswith((reasoning or "").rstrip())
        assert (form.said or "").startswith((content or "").rstrip()), end
        for (name, text), (full_name, full) in zip(calls, CALLS, strict=False):
            assert name == full_name
            assert full.startswith(text)
            assert text.startswith("{")
        # Only the last call may lack something.
        assert all(is_whole(text) for _, text in calls[:-1])


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("form", [HERMES, CODER], ids=str)
def test_pieces_of_any_size_make_the_same_answer(form: Form, step: int) -> None:
    one = reader(form)
    for end in (*range(1, len(one.ids), step), len(one.ids)):
        singly = one.streamed(end, LENGTH)
        for size in (2, 7, 100):
            assert one.streamed(end, LENGTH, size) == singly, (end, size)


def test_whole_answers_have_what_was_streamed_before() -> None:
    one = reader(HERMES)
    parser = one.parser()
    for text, token in zip(one.texts[:40], one.ids[:40], strict=True):
        parser.parse_delta(text, [token], one.request, [1], finished=False)
    # What a text says that is parsed afterwards does not matter.
    assert parser.parse("", one.request) == parser.streamed.parts()
    assert parser.streamed.calls


def test_logprobs_of_pieces_without_text_have_a_delta() -> None:
    one = reader(HERMES)
    asked = request(logprobs=True, top_logprobs=1)
    parser = one.parser()
    for text, token in zip(one.texts, one.ids, strict=True):
        assert parser.parse_delta(text, [token], asked, [1], finished=False) is not None


@pytest.mark.parametrize(
    ("ending", "calls", "named", "reason"),
    [
        (NATURAL, ["{}"], False, "tool_calls"),
        (NATURAL, ["{}"], True, "stop"),
        (NATURAL, ["{}", '{"a'], False, "stop"),
        (NATURAL, [], False, "stop"),
        (Ending("stop", "x"), ["{}"], False, "tool_calls"),
        (Ending("stop", "x"), ["{"], False, "stop"),
        (LENGTH, ["{}"], False, "length"),
        (LENGTH, ["{}"], True, "length"),
        (Ending("content_filter"), ["{}"], False, "content_filter"),
        (Ending("abort"), ["{"], False, "abort"),
    ],
)
def test_finish_reasons(ending: Ending, calls: list[str], named: bool, reason: str) -> None:
    assert finish_reason(ending, calls, named=named) == reason


# ------------------------------------------------------------------------------------------- parser
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FORCED: Any = {"type": "function", "function": {"name": "look"}}
TOKENIZER = AutoTokenizer.from_pretrained(CHECKPOINT)


def parsed_request(choice: Any, *functions: dict[str, Any]) -> ChatCompletionRequest:
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


def parsed_whole(text: str, asked: Any) -> tuple[str, list[Any]]:
    _, content, calls = parser(asked).parse(text, asked, enable_auto_tools=True)
    return content or "", [[call.name, call.arguments] for call in calls or ()]


AUTO = parsed_request("auto", {"parameters": SCHEMA})
GOOD = '<tool_call>{"name": "look", "arguments": {"city": "Ulm"}}</tool_call>'
TEXT = '<tool_call>{"name": "look", "arguments": "Ulm"}</tool_call>'
LIST = '<tool_call>{"name": "look", "arguments": ["Ulm"]}</tool_call>'


@pytest.mark.parametrize("read", [parsed_whole, streamed])
def test_a_call_with_an_object_is_one(read: Any) -> None:
    content, calls = read("I look. " + GOOD, AUTO)
    assert content.strip() == "I look."
    assert [(name, json.loads(text)) for name, text in calls] == [("look", {"city": "Ulm"})]


@pytest.mark.parametrize("read", [parsed_whole, streamed])
@pytest.mark.parametrize("text", [TEXT, LIST, "I look. " + TEXT, TEXT + LIST])
def test_what_has_no_object_is_text_to_the_letter(read: Any, text: str) -> None:
    assert read(text, AUTO) == (text, [])


@pytest.mark.parametrize("read", [parsed_whole, streamed])
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
    schemas = guided(parsed_request(choice, {"parameters": SCHEMA, "strict": strict}))
    assert schemas
    assert all(schema == SCHEMA for schema in schemas)


@pytest.mark.parametrize("parameters", [None, {}, {"properties": {}}])
def test_a_tool_that_says_nothing_has_an_object(parameters: Any) -> None:
    schemas = guided(parsed_request("required", {"parameters": parameters, "strict": False}))
    assert {schema["type"] for schema in schemas} == {"object"}


def test_a_free_choice_is_guided_once_a_tool_insists() -> None:
    loose = parsed_request("auto", {"parameters": SCHEMA, "strict": False})
    assert parser(loose).adjust_request(loose).structured_outputs is None
    other = {"name": "listen", "parameters": {"type": "object"}, "strict": True}
    assert SCHEMA in guided(parsed_request("auto", {"parameters": SCHEMA, "strict": False}, other))


def listed(mode: str, *names: str, **more: Any) -> ChatCompletionRequest:
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


@pytest.mark.parametrize("read", [parsed_whole, streamed])
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
    for read in (parsed_whole, streamed):
        content, calls = read(GOOD, asked)
        assert (content, [name for name, _ in calls]) == ("", ["look"])


@pytest.mark.parametrize("read", [parsed_whole, streamed])
def test_one_call_is_all_where_calls_may_not_be_parallel(read: Any) -> None:
    two = GOOD + GOOD.replace("Ulm", "Bonn")
    one = parsed_request("auto", {"parameters": SCHEMA})
    one.parallel_tool_calls = False
    assert [json.loads(text) for _, text in read(two, one)[1]] == [{"city": "Ulm"}]
    one.parallel_tool_calls = True
    assert len(read(two, one)[1]) == 2


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_grammar_ends_after_the_one_call_that_may_be(choice: str) -> None:
    asked = parsed_request(choice, {"parameters": SCHEMA, "strict": True})
    for parallel in (True, False):
        asked.parallel_tool_calls = parallel
        adjusted = parser(asked).adjust_request(asked)
        tag = json.loads(adjusted.structured_outputs.structural_tag)
        assert tag["format"]["stop_after_first"] is not parallel


def test_the_tools_themselves_stay_as_they_were_given() -> None:
    asked = parsed_request("required", {"parameters": {}, "strict": False})
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
    assert get_tool_parser_name(ours) == get_tool_parser_name(qwen) == "hermes"
    glm = "<tool_call>{name}\\n<arg_key>{{ tool_call['arguments'] }}"
    coder = "<tool_call>\\n<function=name>{{ tool_call['arguments'] }}"
    for template in ("", "{{ messages }}", "<tool_call>", glm, coder):
        assert get_tool_parser_name(template) is None


def test_an_answer_without_tools_is_text_at_once() -> None:
    asked = ChatCompletionRequest(messages=[{"role": "user", "content": "a"}])
    assert streamed(GOOD, asked) == (GOOD, [])
    assert parser(asked).parse_delta("", [5], asked, [1], finished=True) is None
