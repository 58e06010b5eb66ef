"""Tool calls of a real server over each API, whole and streamed: what they are, and refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from default_model.paths import CHECKPOINT
from tests.server.real_server import RealServer

pytestmark = pytest.mark.engine

APIS = ("chat", "responses", "messages")
PATHS = {
    "chat": "/v1/chat/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}
TEXT = {
    "type": "object",
    "properties": {"text": {"type": "string"}},
    "required": ["text"],
    "additionalProperties": False,
}
WRITE = {"name": "write", "parameters": TEXT}
OPEN = '<tool_call>\n{"name": "write", "arguments": {"text": "one two'
Answer = tuple[str, list[tuple[str, str]]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    flags = ("--max-model-len", "1024", "--dtype", "bfloat16")
    with RealServer(CHECKPOINT, tmp_path_factory.mktemp("c"), *flags) as up:
        up.until_ready()
        yield up


def say(text: str) -> dict[str, Any]:
    """Return the constraint that forces the text of an answer."""
    return {"grammar": "root ::= " + json.dumps(text, ensure_ascii=False)}


def tool(api: str, function: dict[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of an API."""
    if api == "chat":
        return {"type": "function", "function": function}
    if api == "responses":
        return {"type": "function", **function}
    schema = function.get("parameters", {"type": "object", "properties": {}})
    return {"name": function["name"], "input_schema": schema}


def post(server: RealServer, api: str, *functions: dict[str, Any], **more: Any) -> Any:
    limit = "max_output_tokens" if api == "responses" else "max_tokens"
    body = {"model": "tiny", "temperature": 0, limit: 80, **more}
    body["tools"] = [tool(api, one) for one in functions]
    asked = "input" if api == "responses" else "messages"
    body.setdefault(asked, [{"role": "user", "content": "Call it."}])
    return server.client.post(PATHS[api], json=body)


def answer(server: RealServer, api: str, *functions: dict[str, Any], **more: Any) -> Answer:
    """Return the text and the calls of an answer: the same whole and streamed."""
    whole = post(server, api, *functions, **more)
    stream = post(server, api, *functions, stream=True, **more)
    assert (whole.status_code, stream.status_code) == (200, 200), whole.text
    lines = [one.removeprefix("data: ") for one in stream.text.splitlines()]
    events = [json.loads(one) for one in lines if one.startswith("{")]
    found = _whole(api, whole.json())
    assert _streamed(api, events) == found
    return found


def _whole(api: str, body: Any) -> Answer:
    if api == "chat":
        message = body["choices"][0]["message"]
        calls = [one["function"] for one in message.get("tool_calls") or []]
        return message["content"] or "", [(one["name"], one["arguments"]) for one in calls]
    items = body["output" if api == "responses" else "content"]
    if api == "responses":
        parts = [part for one in items if one["type"] == "message" for part in one["content"]]
        calls = [one for one in items if one["type"] == "function_call"]
        return "".join(p["text"] for p in parts), [(c["name"], c["arguments"]) for c in calls]
    text = "".join(one["text"] for one in items if one["type"] == "text")
    uses = [one for one in items if one["type"] == "tool_use"]
    return text, [(one["name"], json.dumps(one["input"])) for one in uses]


def _streamed(api: str, events: list[Any]) -> Answer:
    if api == "responses":
        return _whole(api, events[-1]["response"])
    text, calls = "", dict[int, list[str]]()
    for event in events:
        if api == "chat":
            for choice in event["choices"]:
                text += choice["delta"].get("content") or ""
                for one in choice["delta"].get("tool_calls") or []:
                    call = calls.setdefault(one["index"], [one["function"].get("name"), ""])
                    call[1] += one["function"]["arguments"]
        elif event["type"] == "content_block_start" and "name" in event["content_block"]:
            calls[event["index"]] = [event["content_block"]["name"], ""]
        elif event["type"] == "content_block_delta":
            text += event["delta"].get("text", "")
            if "partial_json" in event["delta"]:
                calls[event["index"]][1] += event["delta"]["partial_json"]
    if api == "messages":
        return text, [(name, json.dumps(json.loads(text or "{}"))) for name, text in calls.values()]
    return text, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        ('{"text": "x </tool_call> y"}', True),
        ('{"text": "a</tool_call>\\n<tool_call>\\nb"}', True),
        ('{"text": NaN}', False),
        ('{"text": "a\nb"}', False),
        ('{"text": "a",}', False),
    ],
)
def test_a_call_is_its_json(server: RealServer, api: str, arguments: str, calls: bool) -> None:
    text = f'<tool_call>{{"name": "write", "arguments": {arguments}}}</tool_call>'
    found = answer(server, api, WRITE, structured_outputs=say(text))
    assert found == (("", [("write", arguments)]) if calls else (text, []))


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"name": "ping"}</tool_call>', [("ping", "{}")]),
        ('<tool_call>{"name": "ping", "parameters": {"a": 1}}</tool_call>', [("ping", '{"a": 1}')]),
        ('<tool_call>{"name": "p\\u0069ng", "arguments": {}}</tool_call>', [("ping", "{}")]),
        ('<tool_call>{"name": "pong", "arguments": {}}</tool_call>', []),
    ],
)
def test_the_members_of_a_call(server: RealServer, api: str, text: str, calls: Any) -> None:
    found = answer(server, api, {"name": "ping"}, structured_outputs=say(text))
    assert found == ("" if calls else text, calls)


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("more", [{}, {"parameters": {"type": "object", "properties": {}}}])
def test_a_tool_without_parameters_has_none(server: RealServer, api: str, more: Any) -> None:
    choice = {"type": "any"} if api == "messages" else "required"
    found = answer(server, api, {"name": "ping", **more}, tool_choice=choice)
    assert found[1][:1] == [("ping", "{}")]


@pytest.mark.parametrize("parameters", [None, {}, {"title": "Ping"}])
def test_parameters_that_say_nothing_are_none(server: RealServer, parameters: Any) -> None:
    ping = {"name": "ping", "parameters": parameters}
    named = {"type": "function", "function": {"name": "ping"}}
    assert answer(server, "chat", ping, tool_choice=named) == ("", [("ping", "{}")])


def test_a_strict_call_of_a_named_tool_has_its_whole_argument(server: RealServer) -> None:
    text = {"type": "string", "pattern": "^x</tool_call[<>]y$"}
    write = {"name": "write", "parameters": {**TEXT, "properties": {"text": text}}, "strict": True}
    named = {"type": "function", "function": {"name": "write"}}
    bias = {"33": 100}
    found = answer(server, "chat", write, tool_choice=named, logit_bias=bias)
    assert found == ("", [("write", '{"text": "x</tool_call>y"}')])


def test_a_stop_within_a_call_cuts_it(server: RealServer) -> None:
    city = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    weather = {"name": "get_weather", "parameters": city}
    more: Any = {"messages": [{"role": "user", "content": "What is the weather in Paris?"}]}
    free = post(server, "chat", weather, return_token_ids=True, **more).json()["choices"][0]
    (call,) = free["message"]["tool_calls"]
    full, cuts = call["function"]["arguments"], set[str]()
    for token in set(free["token_ids"]):
        text, calls = answer(server, "chat", weather, stop_token_ids=[token], **more)
        assert text == ""
        assert all(name == "get_weather" and full.startswith(one) for name, one in calls)
        cuts.update(one for _, one in calls)
    assert len(cuts) > 2
    assert answer(server, "chat", weather, stop=["weather"], **more) == ("", [])
    assert answer(server, "chat", weather, stop=["city"], **more) == ("", [("get_weather", '{"')])


@pytest.mark.parametrize("api", ["chat", "responses"])
def test_the_token_that_ends_an_answer_is_not_shown(server: RealServer, api: str) -> None:
    asked = "input" if api == "responses" else "messages"
    more = {asked: [{"role": "user", "content": "Hello!"}], "include_stop_str_in_output": True}
    text, _ = answer(server, api, {"name": "ping"}, **more)
    assert text.endswith("?")
    cut, _ = answer(server, api, {"name": "ping"}, stop=["small"], **more)
    assert cut.endswith("small")
    shown, _ = answer(server, api, {"name": "ping"}, skip_special_tokens=False, **more)
    assert shown == f"{text}<|im_end|>"


@pytest.mark.parametrize("api", APIS)
@pytest.mark.parametrize("name", ["", " ", 'a"b', "a\\b", "</tool_call>", "a\nb", "x" * 257])
def test_a_name_that_no_call_can_have_is_refused(server: RealServer, api: str, name: str) -> None:
    found = post(server, api, {"name": "ping"}, {"name": name})
    assert found.status_code == 400
    error = found.json()["error"]
    path = "tools[1].function.name" if api == "chat" else "tools[1].name"
    assert path in error["message"]
    assert "256" in error["message"]
    assert api == "messages" or (error["param"], error["code"]) == (path, "invalid_value")


def test_names_that_clients_send_are_called(server: RealServer) -> None:
    for name in ("mcp__files.read/text:all", "get weather", "wetter-für_日本", "x" * 200):
        asked = {"tool_choice": "required", "max_tokens": 300}
        assert answer(server, "chat", {"name": name}, **asked)[1] == [(name, "{}")]


def continued(api: str, text: str) -> dict[str, Any]:
    """Return the fields of a request whose answer continues a text."""
    user = {"role": "user", "content": "Call it."}
    if api == "responses":
        part = {"type": "output_text", "text": text, "annotations": []}
        last = {"type": "message", "id": "m", "role": "assistant", "status": "incomplete"}
        return {"input": [user, {**last, "content": [part]}]}
    turns = [user, {"role": "assistant", "content": text}]
    return {"messages": turns, "continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize("api", ["chat", "responses"])
@pytest.mark.parametrize("rest", [' three"}}\n</tool_call>', ' </tool_call>"}}', '"}}\n'])
def test_a_call_that_is_continued_comes_back(server: RealServer, api: str, rest: str) -> None:
    found = answer(server, api, WRITE, structured_outputs=say(rest), **continued(api, OPEN))
    whole = (OPEN + rest).partition('"arguments": ')[2].partition("}")[0] + "}"
    assert found == ("", [("write", whole)])


@pytest.mark.parametrize(
    ("choice", "strict", "param"),
    [("required", False, "tool_choice"), ("auto", True, "tools")],
)
def test_the_rest_of_a_call_cannot_be_guided(
    server: RealServer, choice: str, strict: bool, param: str
) -> None:
    for api in ("chat", "responses"):
        write = {**WRITE, "strict": strict}
        found = post(server, api, write, tool_choice=choice, **continued(api, OPEN))
        assert found.status_code == 400
        assert found.json()["error"]["param"] == param
        found = post(server, api, write, tool_choice=choice, **continued(api, "I call."))
        assert found.status_code == 200


def test_calls_of_a_message_cannot_be_continued(server: RealServer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "ping", "arguments": "{}"}}
    turns: list[Any] = [{"role": "user", "content": "Call it."}]
    turns.append({"role": "assistant", "content": "I will ", "tool_calls": [call]})
    more = {"continue_final_message": True, "add_generation_prompt": False}
    found = post(server, "chat", {"name": "ping"}, messages=turns, **more)
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "messages[1].tool_calls"
    assert post(server, "chat", {"name": "ping"}, messages=turns).status_code == 200


def test_a_last_tool_use_is_in_the_prompt(server: RealServer) -> None:
    use = {"type": "tool_use", "id": "t", "name": "ping", "input": {}}
    counts = []
    for given in ({}, {"city": "a long name of a city"}):
        content = [{"type": "text", "text": "I will."}, {**use, "input": given}]
        turns = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": content}]
        found = post(server, "messages", {"name": "ping"}, messages=turns).json()
        kinds = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
        counts.append(sum(found["usage"][kind] for kind in kinds))
    assert counts[1] > counts[0]
