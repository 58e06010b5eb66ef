"""Stored responses of a real engine by the official client: what is continued is what was said."""

import base64
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest

from server.errors import InvalidValueError, MissingFieldError
from server.storage.compaction import (
    compacted,
    compaction_item,
    expand_compactions,
    max_summary_tokens,
    summarise,
)
from tests.checkpoints import CheckpointCache
from tests.server.real_server import RealServer

WISH: dict[str, Any] = {"model": "tiny", "max_output_tokens": 12, "temperature": 0}
TOOL: dict[str, Any] = {
    "type": "function",
    "name": "look",
    "parameters": {
        "type": "object",
        "properties": {"at": {"enum": ["a", "b"]}},
        "required": ["at"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.fixture(scope="module")
def server(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RealServer]:
    folder = tmp_path_factory.mktemp("s")
    flags = ("--data-dir", str(folder / "data"), "--min-free-bytes", "0", "--max-model-len", "512")
    flags += ("--tool-call-parser", "hermes", "--enable-auto-tool-choice")
    with RealServer(checkpoints("llama"), folder, *flags) as up:
        up.until_ready()
        yield up


def ask(client: openai.OpenAI, given: Any, **wish: Any) -> Any:
    return client.responses.create(input=given, **{**WISH, **wish})


def said(response: Any) -> list[dict[str, Any]]:
    """Return the items of an answer as a client sends them back."""
    return [item.model_dump(exclude_none=True) for item in response.output]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """Keep a process from running, so that what it computes is not over too early."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def until_ended(client: openai.OpenAI, response: Any) -> Any:
    deadline = time.monotonic() + 60
    while response.status in ("queued", "in_progress"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
        response = client.responses.retrieve(response.id)
    return response


@pytest.mark.engine
def test_a_conversation_is_what_the_whole_of_it_would_be(client: openai.OpenAI) -> None:
    first = ask(client, "one", instructions="Be short.")
    second = ask(client, [user("two")], previous_response_id=first.id)
    third = ask(client, "three", previous_response_id=second.id, instructions="Be long.")
    assert third.previous_response_id == second.id
    for response, turns, instructions in (
        (second, [user("one"), *said(first), user("two")], None),
        (third, [user("one"), *said(first), user("two"), *said(second), user("three")], "Be long."),
    ):
        whole = ask(client, turns, instructions=instructions, store=False)
        assert whole.output_text == response.output_text
        assert whole.usage.input_tokens == response.usage.input_tokens
    # Two may go on from one turn.
    assert ask(client, "other", previous_response_id=first.id).output_text
    for turn in (first, second, third):
        assert client.responses.retrieve(turn.id).output_text == turn.output_text


@pytest.mark.engine
def test_calls_of_tools_are_turns_too(client: openai.OpenAI) -> None:
    forced = {"tools": [TOOL], "tool_choice": {"type": "function", "name": "look"}}
    first = ask(client, "look", max_output_tokens=60, **forced)
    (call,) = (item for item in first.output if item.type == "function_call")
    item = {"type": "function_call_output", "call_id": call.call_id, "output": "seen"}
    second = ask(client, [item], previous_response_id=first.id, tools=[TOOL])
    whole = ask(client, [user("look"), *said(first), item], tools=[TOOL], store=False)
    assert second.output_text == whole.output_text
    assert second.usage.input_tokens == whole.usage.input_tokens


@pytest.mark.engine
def test_a_stream_is_kept(client: openai.OpenAI) -> None:
    events = list(ask(client, "stream", stream=True))
    # It was cut, as every answer of twelve tokens here.
    assert (events[-1].type, events[-1].response.status) == ("response.incomplete", "incomplete")
    last = events[-1].response
    kept = client.responses.retrieve(last.id)
    assert kept.output_text == last.output_text
    assert kept.to_dict()["store"] is True
    follow = ask(client, "on", previous_response_id=last.id)
    whole = ask(client, [user("stream"), *said(last), user("on")], store=False)
    assert follow.output_text == whole.output_text


@pytest.mark.engine
def test_what_is_not_kept_says_so(client: openai.OpenAI) -> None:
    response = ask(client, "x", store=False)
    assert response.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError) as caught:
        ask(client, "y", previous_response_id=response.id)
    assert caught.value.param == "previous_response_id"


@pytest.mark.engine
def test_items_are_listed_in_pages(client: openai.OpenAI) -> None:
    turns = [user(f"turn {number}") for number in range(5)]
    response = ask(client, turns)
    items = list(client.responses.input_items.list(response.id, limit=2))
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
    assert texts == [turn["content"] for turn in reversed(turns)]
    rising = client.responses.input_items.list(response.id, order="asc", after=items[3].id)
    assert [item.id for item in rising] == [item.id for item in reversed(items[:3])]


@pytest.mark.engine
def test_what_is_deleted_is_gone(client: openai.OpenAI) -> None:
    first = ask(client, "one")
    second = ask(client, "two", previous_response_id=first.id)
    client.responses.delete(first.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(first.id)
    assert client.responses.retrieve(second.id).output_text == second.output_text
    with pytest.raises(openai.NotFoundError, match=first.id):
        ask(client, "three", previous_response_id=second.id)


@pytest.mark.engine
def test_one_is_made_meanwhile(client: openai.OpenAI) -> None:
    first = ask(client, "one")
    response = ask(client, "two", background=True, previous_response_id=first.id)
    assert response.status in ("queued", "in_progress")
    assert response.background
    done = until_ended(client, response)
    assert done.id == response.id
    assert done.background
    assert done.output_text == ask(client, "two", previous_response_id=first.id).output_text
    assert client.responses.cancel(done.id).status == done.status


@pytest.mark.engine
def test_events_go_on_where_they_were_left(client: openai.OpenAI) -> None:
    wish = {"background": True, "stream": True, "max_output_tokens": 40}
    wish |= {"extra_body": {"ignore_eos": True}}
    stream = ask(client, "events", **wish)
    seen = [next(stream) for _ in range(6)]
    stream.close()
    name = seen[0].response.id
    rest = list(
        client.responses.retrieve(name, stream=True, starting_after=seen[-1].sequence_number)
    )
    numbers = [event.sequence_number for event in seen + rest]
    assert numbers == list(range(len(numbers)))
    text = "".join(e.delta for e in seen + rest if e.type == "response.output_text.delta")
    kept = client.responses.retrieve(name)
    assert text == kept.output_text
    assert rest[-1].response.output_text == text  # type: ignore[union-attr]
    again = list(client.responses.retrieve(name, stream=True))
    assert [event.sequence_number for event in again] == numbers


def check_agreement(events: list[Any]) -> Any:
    """Assert that items have in all events the ids that they have at the end; return that."""
    last = events[-1].response
    added = [event.item for event in events if event.type == "response.output_item.added"]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.id for item in added] == [item.id for item in last.output]
    assert done == last.output
    for place, item in enumerate(last.output):
        own = [event for event in events if getattr(event, "output_index", None) == place]
        assert {event.item_id for event in own if hasattr(event, "item_id")} == {item.id}
        assert getattr(added[place], "call_id", None) == getattr(item, "call_id", None)
    return last


@pytest.mark.engine
@pytest.mark.parametrize("background", [False, True])
@pytest.mark.parametrize("choice", ["none", "required"])
def test_items_have_one_id_from_the_first_event_to_the_store(
    client: openai.OpenAI, choice: str, background: bool
) -> None:
    wish = {"tools": [TOOL], "tool_choice": choice, "max_output_tokens": 60}
    events = list(ask(client, "look", stream=True, background=background, **wish))
    last = check_agreement(events)
    assert last.output
    kept = client.responses.retrieve(last.id)
    assert kept.output == last.output
    if background:
        for after in (None, 3):
            more = {} if after is None else {"starting_after": after}
            again = list(client.responses.retrieve(last.id, stream=True, **more))
            assert again == events[-len(again) :]
            assert again[-1].response.output == last.output
    # What the next turn says of a call is about the call that was stored.
    items = said(last)
    for item in last.output:
        if item.type == "function_call":
            items.append(
                {"type": "function_call_output", "call_id": item.call_id, "output": "seen"}
            )
    rest = [*items[len(last.output) :], user("on")]
    second = ask(client, rest, previous_response_id=last.id, tools=[TOOL])
    whole = ask(client, [user("look"), *items, user("on")], tools=[TOOL], store=False)
    assert second.usage.input_tokens == whole.usage.input_tokens
    assert second.output_text == whole.output_text


@pytest.mark.engine
def test_one_is_cancelled(server: RealServer, client: openai.OpenAI) -> None:
    endless = {"extra_body": {"ignore_eos": True}, "max_output_tokens": 400}
    stream = ask(client, "x", background=True, stream=True, **endless)
    id_ = next(iter(stream)).response.id
    next(event for event in stream if event.type == "response.output_text.delta")
    with stopped(server.engine_pid()):
        assert client.responses.cancel(id_).status == "cancelled"
        assert client.responses.cancel(id_).status == "cancelled"
        assert client.responses.retrieve(id_).status == "cancelled"
    deadline = time.monotonic() + 60
    while server.metric("vllm:num_requests_running"):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    with pytest.raises(openai.BadRequestError, match="cannot be cancelled"):
        client.responses.cancel(ask(client, "y").id)


@pytest.mark.engine
def test_what_cannot_be_made_fails_with_the_reason(client: openai.OpenAI) -> None:
    response = until_ended(client, ask(client, "x", background=True, model="unknown-model"))
    assert response.status == "failed"
    assert "unknown-model" in response.error.message
    stream = ask(client, "x", background=True, stream=True, model="unknown-model")
    (event,) = list(stream)
    assert event.type == "response.failed"
    assert "unknown-model" in event.response.error.message


@pytest.mark.engine
def test_a_stream_that_fails_ends_with_the_failed_response(server: RealServer) -> None:
    body = {**WISH, "input": "x", "stream": True, "max_output_tokens": 400, "ignore_eos": True}
    with server.client.stream(
        "POST", "/v1/responses", json=body, headers={"x-request-timeout-ms": "2000"}
    ) as stream:
        lines = stream.iter_lines()
        read = [next(line for line in lines if "response.created" in line)]
        # 400 tokens take less than the deadline on some processors.
        with stopped(server.engine_pid()):
            read += lines
    frames = [line[6:] for line in read if line.startswith("data: ")]
    *events, error, failed = map(json.loads, frames)
    assert [event["sequence_number"] for event in (*events, error, failed)] == list(
        range(len(frames))
    )
    assert (error["type"], error["code"]) == ("error", "deadline_exceeded")
    assert error["error"]["message"] == error["message"]
    assert failed["type"] == "response.failed"
    response = failed["response"]
    assert (response["id"], response["status"]) == (events[0]["response"]["id"], "failed")
    assert response["error"] == {"code": "deadline_exceeded", "message": error["message"]}


def prompt_tokens(client: openai.OpenAI, given: Any, **wish: Any) -> int:
    return ask(client, given, store=False, **wish).usage.input_tokens  # type: ignore[no-any-return]


@pytest.mark.engine
def test_a_prompt_has_the_tokens_that_a_chat_has(client: openai.OpenAI) -> None:
    turns: Any = [user("one"), {"role": "assistant", "content": "two"}, user("three")]
    chat = client.chat.completions.create(model="tiny", messages=turns, max_tokens=1)
    assert chat.usage is not None
    assert prompt_tokens(client, turns) == chat.usage.prompt_tokens


@pytest.mark.engine
def test_a_count_is_what_the_request_costs(client: openai.OpenAI) -> None:
    first = ask(client, "one")
    for wish in (
        {"input": "one"},
        {"input": [user("one"), user("two")], "instructions": "Be short."},
        {"input": "look", "tools": [TOOL]},
        {"input": "two", "previous_response_id": first.id},
    ):
        given = dict(wish)
        counted = client.responses.input_tokens.count(model="tiny", **wish)  # type: ignore[arg-type]
        assert counted.object == "response.input_tokens"
        # A response needs the store for the one that it continues.
        response = ask(client, given.pop("input"), **given)
        assert counted.input_tokens == response.usage.input_tokens


@pytest.mark.engine
def test_a_prompt_beyond_the_context_is_counted(client: openai.OpenAI) -> None:
    counted = client.responses.input_tokens.count(model="tiny", input="a b c d e f " * 400)
    assert counted.input_tokens > 512


@pytest.mark.engine
def test_a_count_names_what_it_ignores(client: openai.OpenAI) -> None:
    raw = client.responses.input_tokens.with_raw_response.count(
        model="tiny", input="one", extra_body={"temperature": 1, "max_output_tokens": 5}
    )
    assert raw.headers["x-rbln-ignored-fields"] == "max_output_tokens, temperature"
    with pytest.raises(openai.BadRequestError, match="tempratur"):
        client.responses.input_tokens.count(model="tiny", input="one", extra_body={"tempratur": 1})
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.input_tokens.count(model="tiny")
    assert caught.value.param == "input"


CONVERSATION: list[Any] = [
    {"role": "developer", "content": "Be short."},
    user("one"),
    {"role": "assistant", "content": "two"},
    {"role": "user", "content": [{"type": "input_text", "text": "three"}]},
]


@pytest.mark.engine
def test_a_conversation_is_compacted_and_continued(client: openai.OpenAI) -> None:
    compacted = client.responses.compact(model="tiny", input=CONVERSATION)
    assert compacted.object == "response.compaction"
    assert compacted.usage.output_tokens > 0
    # The client has no type for a user's message in an output.
    *kept, compaction = [item.to_dict(warnings=False) for item in compacted.output]
    assert [item["role"] for item in kept] == ["developer", "user"]
    assert [part["text"] for part in kept[1]["content"]] == ["one", "three"]
    assert compaction["type"] == "compaction"
    # The window is what stays and the summary; another turn goes behind it.
    window = [*kept, compaction]
    longer = [*window, user("four")]
    assert prompt_tokens(client, longer) > prompt_tokens(client, [*kept, user("four")])
    # So it is once more, and for what a stored conversation was.
    again = client.responses.compact(model="tiny", input=longer)  # type: ignore[arg-type]
    assert [item.type for item in again.output].count("compaction") == 1
    first = ask(client, longer)
    stored = client.responses.compact(model="tiny", previous_response_id=first.id)
    assert [item.type for item in stored.output] == ["message", "message", "compaction"]
    assert ask(client, "five", previous_response_id=first.id).output_text


@pytest.mark.engine
def test_a_trigger_compacts_in_a_response(client: openai.OpenAI) -> None:
    given: Any = {
        "model": "tiny",
        "input": [*CONVERSATION, {"type": "compaction_trigger"}],
        "tools": [{"type": "function", "name": "f", "parameters": {"type": "object"}}],
        "tool_choice": "auto",
        "text": {"format": {"type": "json_object"}},
        "max_output_tokens": 1,
    }
    compacted = client.responses.compact(model="tiny", input=CONVERSATION)
    whole = client.responses.create(**given)
    (item,) = whole.output
    assert (item.type, whole.status, whole.incomplete_details) == ("compaction", "completed", None)
    assert item.encrypted_content == compacted.output[-1].to_dict()["encrypted_content"]
    assert whole.usage is not None and compacted.usage is not None
    assert whole.usage.input_tokens == compacted.usage.input_tokens
    events = list(client.responses.create(**given, stream=True, store=False))
    assert [event.type for event in events] == [
        "response.created",
        "response.in_progress",
        *"response.output_item.added response.output_item.done response.completed".split(),
    ]
    last = events[-1].response
    assert last.status == "completed" and [one.type for one in last.output] == ["compaction"]
    assert last.output[0].to_dict() == events[2].item.to_dict() == events[3].item.to_dict()
    assert last.output[0].encrypted_content == item.encrypted_content
    # The item is input of the next request, and so is the stored conversation.
    assert ask(client, [item.to_dict(), user("four")]).output_text
    assert ask(client, "four", previous_response_id=whole.id).output_text
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [{"type": "compaction_trigger"}, user("four")])
    assert caught.value.param == "input[0]"
    with pytest.raises(openai.BadRequestError) as caught:
        ask(client, [{"type": "compaction_trigger"}])
    assert caught.value.param == "input"


@pytest.mark.engine
def test_a_compaction_that_is_none_is_refused(client: openai.OpenAI) -> None:
    for content in ("", "gAAAAAB", "rbln1.", "rbln1.!!", "rbln1.bnVsbA==", "rbln1.e30="):
        item = {"type": "compaction", "encrypted_content": content}
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, [user("one"), item])
        assert caught.value.param == "input[1].encrypted_content"


@pytest.mark.engine
def test_what_cannot_be_compacted_is_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.compact(model="tiny", input=[])
    assert caught.value.param == "input"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.compact(model="tiny", input="one", extra_body={"temperature": 1})
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.compact(model="tiny", input="a b c d e f " * 400)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.responses.compact(model="tiny", previous_response_id="resp_none")


# --------------------------------------------------------------------------------------- compaction
def content(text: bytes) -> str:
    return "rbln1." + base64.urlsafe_b64encode(text).decode()


def expanded(*items: Any) -> list[Any]:
    body = {"input": [*items]}
    expand_compactions(body)
    return body["input"]


def texts(message: Any) -> list[str]:
    found = message["content"]
    return [found] if isinstance(found, str) else [part["text"] for part in found]


@pytest.mark.parametrize("summary", ["They met.", "a\n\u2603\U0001f600?>\\ud800" * 99])
def test_a_summary_comes_back_as_an_answer(summary: str) -> None:
    first, message = expanded(user("a"), compaction_item(summary))
    assert first == user("a")
    assert message["role"] == "assistant"
    assert texts(message)[0].endswith(summary)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        7,
        "",
        "gAAAAABpM0Yj",
        "rbln2." + content(b'{"summary":"a"}')[6:],
        "rbln1.",
        "rbln1.\u2603",
        content(b'{"summary":"a"}') + "!",
        content(b"\xff"),
        content(b"null"),
        content(b"[]"),
        content(b'"summary"'),
        content(b'{"summary":7}'),
        content(b'{"summary":"a","role":"system"}'),
    ],
)
def test_content_of_another_kind_is_refused(wrong: Any) -> None:
    with pytest.raises(InvalidValueError) as caught:
        expanded(user("a"), {"type": "compaction", "encrypted_content": wrong})
    assert caught.value.param == "input[1].encrypted_content"


def test_other_items_stay() -> None:
    items = [user("a"), "b", 7, {"type": "reasoning"}, {"type": ["compaction"]}]
    assert expanded(*items) == items
    body = {"input": "a"}
    expand_compactions(body)
    assert body == {"input": "a"}


LONG_CONVERSATION: list[Any] = [
    {"role": "system", "content": "Be short."},
    user("one"),
    {"role": "assistant", "content": "two"},
    {"type": "function_call", "call_id": "c", "name": "look", "arguments": "{}"},
    {"type": "function_call_output", "call_id": "c", "output": "seen"},
    {"role": "user", "content": [{"type": "input_text", "text": "three"}]},
    {"type": "message", "role": "developer", "content": "In verse."},
]


def test_users_and_instructions_stay() -> None:
    body: dict[str, Any] = {"input": [*LONG_CONVERSATION]}
    kept = summarise(body, 8192)
    assert [message["role"] for message in kept] == ["system", "developer", "user"]
    assert texts(kept[2]) == ["one", "three"]
    assert len({message["id"] for message in kept}) == 3
    assert body["input"][: len(LONG_CONVERSATION)] == LONG_CONVERSATION
    assert body["input"][-1]["role"] == "user"
    assert body["max_output_tokens"] == 1024


def test_the_instruction_is_part_of_the_last_turn_of_the_user() -> None:
    body: dict[str, Any] = {"input": "one"}
    kept = summarise(body, 80)
    (turn,) = body["input"]
    assert texts(turn)[0] == "one"
    assert texts(kept[0]) == ["one"]
    assert body["max_output_tokens"] == 10
    body = {"input": LONG_CONVERSATION[:3]}
    summarise(body, 80)
    assert [turn["role"] for turn in body["input"]] == ["system", "user", "assistant", "user"]


@pytest.mark.parametrize("given", [None, "", []])
def test_nothing_cannot_be_compacted(given: Any) -> None:
    with pytest.raises(MissingFieldError) as caught:
        summarise({"input": given}, 80)
    assert caught.value.param == "input"


def test_summaries_have_a_bound() -> None:
    assert [max_summary_tokens(size) for size in (4, 256, 8192, 10**6)] == [1, 32, 1024, 1024]


def test_the_window_ends_with_the_summary() -> None:
    response = {"id": "resp_1", "created_at": 1, "usage": {"input_tokens": 1}}
    made = compacted(response, [user("a")], "They met.")
    assert made["output"][0] == user("a")
    assert made["output"][1]["type"] == "compaction"
    assert made["output"][1]["id"].startswith("cmp_")
    assert (made["id"], made["object"]) == ("resp_1", "response.compaction")
