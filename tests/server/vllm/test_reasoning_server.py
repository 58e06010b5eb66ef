"""Reasoning of a real server: in every API, whole and streamed, with constraints and without."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from default_model.paths import CHECKPOINT
from tests.server.real_server import RealServer
from tests.server.vllm.thinking_model import END, write_thinking_model

pytestmark = pytest.mark.engine

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
ASKED = [{"role": "user", "content": "What is the capital of France?"}]
THOUGHT = "The capital of France is Paris."
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
JSON = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
TOOLS = [{"type": "function", "function": {"name": "w", "parameters": SCHEMA}}]
FLAT = [{"type": "function", "name": "w", "parameters": SCHEMA}]
NAMED = {"type": "function", "function": {"name": "w"}}
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
GO_ON = {"continue_final_message": True, "add_generation_prompt": False}
NEVER_ENDS = {"logit_bias": {str(END): -100}}
CONSTRAINTS: dict[str, dict[str, Any]] = {
    "schema": {"response_format": JSON},
    "object": {"response_format": {"type": "json_object"}},
    "regex": {"structured_outputs": {"regex": "[YN]"}},
    "choice": {"structured_outputs": {"choice": ["yes", "no"]}},
    "grammar": {"structured_outputs": {"grammar": 'root ::= "a" | "b"'}},
    "required": {"tools": TOOLS, "tool_choice": "required"},
    "named": {"tools": TOOLS, "tool_choice": NAMED},
}


@pytest.fixture(
    scope="module", params=["qwen3", pytest.param("deepseek_r1", marks=pytest.mark.wide)]
)
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("s")
    model = write_thinking_model(folder / "model")
    calls = "--enable-auto-tool-choice", "--tool-call-parser", "hermes"
    with RealServer(model, folder, "--reasoning-parser", request.param, *calls) as up:
        up.until_ready()
        yield up


def post(server: RealServer, path: str, **body: Any) -> Any:
    body = {"model": "tiny", "temperature": 0, **body}
    answer = server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        return answer.json()
    lines = (line for line in answer.text.splitlines() if line.startswith("data: {"))
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def chat(server: RealServer, messages: Any = ASKED, **body: Any) -> tuple[Any, ...]:
    """Reasoning, text, arguments, finish and reasoning tokens of a chat, which a stream repeats."""
    body = {"max_tokens": 60, "messages": messages, **body}
    whole = post(server, CHAT, **body)
    choice = whole["choices"][0]
    message = choice["message"]
    found = (
        message["reasoning"] or "",
        message["content"] or "",
        "".join(call["function"]["arguments"] for call in message.get("tool_calls") or ()),
        choice["finish_reason"],
        whole["usage"]["completion_tokens_details"]["reasoning_tokens"],
    )
    chunks = post(server, CHAT, stream=True, stream_options={"include_usage": True}, **body)
    choices = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    deltas = [choice["delta"] for choice in choices]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert found == (
        "".join(delta.get("reasoning") or "" for delta in deltas),
        "".join(delta.get("content") or "" for delta in deltas),
        "".join(call["function"].get("arguments") or "" for call in calls),
        choices[-1]["finish_reason"],
        chunks[-1]["usage"]["completion_tokens_details"]["reasoning_tokens"],
    )
    return found


def message(server: RealServer, messages: Any = ASKED, **body: Any) -> tuple[Any, ...]:
    """Blocks of a message and why it stopped, which a stream repeats."""
    body = {"max_tokens": 60, "messages": messages, **body}
    whole = post(server, MESSAGES, **body)
    found = [(one["type"], one.get("thinking") or one.get("text")) for one in whole["content"]]
    events = post(server, MESSAGES, stream=True, **body)
    texts: dict[int, str] = {}
    for event in events:
        if event["type"] == "content_block_delta":
            delta = event["delta"]
            piece = delta.get("thinking") or delta.get("text") or ""
            texts[event["index"]] = texts.get(event["index"], "") + piece
    assert [text for _, text in found] == [text for text in texts.values() if text]
    (ended,) = (event for event in events if event["type"] == "message_delta")
    assert ended["delta"]["stop_reason"] == whole["stop_reason"]
    return (*found, whole["stop_reason"])


def response(server: RealServer, asked: Any = ASKED, **body: Any) -> tuple[Any, ...]:
    """Items of a response, its status and the reason, which a stream repeats."""
    body = {"max_output_tokens": 60, "input": asked, **body}
    streamed = post(server, RESPONSES, stream=True, **body)[-1]["response"]
    found = _items(post(server, RESPONSES, **body))
    assert found == _items(streamed)
    return found


def _items(found: dict[str, Any]) -> tuple[Any, ...]:
    reason = (found["incomplete_details"] or {}).get("reason")
    return (*((one["type"], _text(one)) for one in found["output"]), found["status"], reason)


def _text(item: dict[str, Any]) -> str:
    return item.get("arguments") or "".join(part["text"] for part in item.get("content") or ())


def test_reasoning_and_answer(server: RealServer) -> None:
    thought, text, _, finish, count = chat(server)
    assert (thought, bool(text), finish, count) == (THOUGHT, True, "length", 7)
    # A marker in the answer is text.
    assert "</think>" in text
    assert message(server)[0] == ("thinking", THOUGHT)
    assert response(server)[0] == ("reasoning", THOUGHT)


@pytest.mark.parametrize("name", CONSTRAINTS)
def test_hidden_reasoning_changes_nothing_else(server: RealServer, name: str) -> None:
    shown = chat(server, **CONSTRAINTS[name])
    assert shown[0] == THOUGHT
    assert shown[1] or shown[2]
    hidden = chat(server, **CONSTRAINTS[name], include_reasoning=False)
    assert hidden == ("", *shown[1:])


@pytest.mark.parametrize("said", ["What does </think> mean?", "<think>", "<think>a</think>b"])
def test_markers_of_a_conversation_are_not_the_answers(server: RealServer, said: str) -> None:
    asked = [{"role": "user", "content": said}, {"role": "assistant", "content": said}, *ASKED]
    thought, text, _, finish, _ = chat(server, asked, structured_outputs={"choice": ["yes"]})
    assert thought
    assert (text, finish) == ("yes", "stop")
    text = chat(server, asked, structured_outputs={"choice": ["yes"]}, **OFF)[1]
    assert text == "yes"


ANSWERS = ["a </think> b", "<think>a</think> b", "</think>", "a <think>"]


@pytest.mark.parametrize("text", ANSWERS)
def test_markers_in_an_answer_are_text(server: RealServer, text: str) -> None:
    say = {"structured_outputs": {"grammar": f"root ::= {json.dumps(text)}"}}
    assert chat(server, **say) == (THOUGHT, text, "", "stop", 7)
    assert chat(server, **say, **OFF) == ("", text, "", "stop", 0)
    begun = [*ASKED, {"role": "assistant", "content": "It is "}]
    assert chat(server, begun, **say, **GO_ON) == ("", text, "", "stop", 0)
    constant = {"type": "object", "properties": {"n": {"const": text}}, "required": ["n"]}
    form = {
        "format": {"type": "json_schema", "schema": {**constant, "additionalProperties": False}}
    }
    for messages, before in ((ASKED, [("thinking", THOUGHT)]), (begun, [])):
        *blocks, (kind, answer), stop = message(server, messages, output_config=form)
        assert (blocks, kind, json.loads(answer), stop) == (before, "text", {"n": text}, "end_turn")


CALL = '<tool_call>\n{"name": "w", "arguments": {"text": "one two'
BEGUN = ["The answer: ", "<think>r</think>It is ", "The tag <think> is", CALL]


@pytest.mark.parametrize("text", BEGUN)
def test_what_continues_an_answer_is_one(server: RealServer, text: str) -> None:
    begun = [*ASKED, {"role": "assistant", "content": text}]
    thought, said, _, _, count = chat(server, begun, **GO_ON, max_tokens=12)
    assert (thought, bool(said), count) == ("", True, 0)
    kind, _ = message(server, begun, max_tokens=12)[0]
    assert kind == "text"
    part = {"type": "output_text", "text": text, "annotations": []}
    item = {"type": "message", "id": "m", "role": "assistant", "status": "incomplete"}
    items = [*ASKED, {**item, "content": [part]}]
    kind, _ = response(server, items, max_output_tokens=12)[0]
    assert kind == "message"


def test_without_thinking_all_is_the_answer(server: RealServer) -> None:
    for constraint in CONSTRAINTS.values():
        found = chat(server, **constraint, **OFF)
        assert (found[0], found[4]) == ("", 0)
        assert found[1] or found[2]
    assert message(server, thinking={"type": "disabled"})[0][0] == "text"
    assert response(server, reasoning={"effort": "none"})[0][0] == "message"


def test_a_stop_string_that_is_the_marker_ends_the_reasoning(server: RealServer) -> None:
    assert chat(server, stop=["</think>"]) == (THOUGHT, "", "", "stop", 7)


def test_reasoning_that_never_ends_leaves_the_demanded_out(server: RealServer) -> None:
    for name, constraint in CONSTRAINTS.items():
        found = chat(server, **constraint, **NEVER_ENDS)
        assert found == (THOUGHT, "", "", "length", 7), name
    assert chat(server, **NEVER_ENDS) == (THOUGHT, "", "", "stop", 7)
    cut = (("reasoning", THOUGHT), "incomplete", "max_output_tokens")
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    assert response(server, text={"format": form}, **NEVER_ENDS) == cut
    assert response(server, tools=FLAT, tool_choice="required", **NEVER_ENDS) == cut
    assert response(server, **NEVER_ENDS) == (("reasoning", THOUGHT), "completed", None)


def test_a_completion_obeys_its_constraint(server: RealServer) -> None:
    for prompt in ("yes or no?", "a</think>", "<think>"):
        body = {"prompt": prompt, "structured_outputs": {"choice": ["yes", "no"]}}
        whole = post(server, "/v1/completions", **body)["choices"][0]["text"]
        chunks = post(server, "/v1/completions", **body, stream=True)
        streamed = "".join(chunk["choices"][0]["text"] for chunk in chunks)
        assert whole == streamed
        assert whole in ("yes", "no")


@pytest.fixture(scope="module")
def granite(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("s")
    with RealServer(CHECKPOINT, folder, "--reasoning-parser", "granite") as up:
        up.until_ready()
        yield up


GRANITE = "Here is my thought process: Hm. Here is my response: Paris"


def test_a_model_that_does_not_think_by_default_is_constrained(granite: RealServer) -> None:
    for name, constraint in CONSTRAINTS.items():
        for more in ({}, {"include_reasoning": False}):
            thought, text, arguments, finish, _ = chat(granite, **constraint, **more)
            assert (thought, finish) == ("", "tool_calls" if name == "required" else "stop"), name
            assert text or json.loads(arguments)
    say = {"structured_outputs": {"grammar": f"root ::= {json.dumps(GRANITE)}"}}
    assert chat(granite, **say)[:2] == (" Hm. ", " Paris")
    form = {"type": "json_schema", "name": "x", "schema": SCHEMA}
    assert response(granite, text={"format": form})[1:] == ("completed", None)
    assert response(granite, tools=FLAT, tool_choice="required")[0][0] == "function_call"
    schema = {"format": {"type": "json_schema", "schema": SCHEMA}}
    ((kind, text), stop) = message(granite, output_config=schema)
    assert (kind, stop, list(json.loads(text))) == ("text", "end_turn", ["n"])
