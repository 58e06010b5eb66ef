"""The text cases of Open Responses: every response and event against its field tables."""

import json
from typing import Any

import httpx
import pytest

from tests.conformance.open_responses import check_compacted, check_response, check_stream
from tests.conformance.target import absent

PATH = "/v1/responses"
PARAMETERS = {"type": "object", "properties": {"lit": {"type": "boolean"}}}
PARAMETERS |= {"required": ["lit"], "additionalProperties": False}
TOOL: dict[str, Any] = {"type": "function", "name": "set_lamp", "description": "Switch a lamp."}
TOOL |= {"parameters": PARAMETERS}
CALL = {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "set_lamp"}
CALL |= {"arguments": '{"lit": true}', "status": "completed"}
OUTPUT = {"type": "function_call_output", "call_id": "call_1", "output": "lit"}


def user(text: str) -> dict[str, Any]:
    return {"type": "message", "role": "user", "content": text}


def said(text: str, **more: Any) -> dict[str, Any]:
    return {"type": "message", "role": "assistant", "content": text, **more}


CASES: dict[str, dict[str, Any]] = {
    "basic": {"input": [user("Name a colour.")]},
    "text": {"input": "Name a colour.", "instructions": "Use one word."},
    "system prompt": {
        "input": [user("Use one word.") | {"role": "system"}, user("Name a colour.")]
    },
    "multi-turn": {"input": [user("I am Ada."), said("Hello Ada."), user("Who am I?")]},
    "phase": {
        "input": [
            user("Is the lamp lit?"),
            said("I look at it.", phase="commentary"),
            said("It is.", phase="final_answer"),
            user("Since when?"),
        ]
    },
    # A call that the limit cuts before its arguments is not reported.
    "tool calling": {"input": [user("Lamp on.")], "tools": [TOOL], "tool_choice": "required"}
    | {"max_output_tokens": 96},
    "tool named": {"input": [user("Lamp on.")], "tools": [TOOL], "max_output_tokens": 96}
    | {"tool_choice": {"type": "function", "name": "set_lamp"}},
    "tool output": {"input": [user("Lamp on."), CALL, OUTPUT], "tools": [TOOL]}
    | {"tool_choice": "none"},
    "labels": {
        "input": "hi",
        "metadata": {"run": "1"},
        "safety_identifier": "s-1",
        "prompt_cache_key": "k-1",
        "service_tier": "default",
        "store": False,
        "truncation": "disabled",
        "reasoning": {"effort": None, "summary": None},
        "text": {"format": {"type": "text"}},
        "parallel_tool_calls": True,
    },
    "log probabilities": {"input": "hi", "include": ["message.output_text.logprobs"]}
    | {"top_logprobs": 2},
}


def post(http: httpx.Client, model: str, name: str, **more: Any) -> httpx.Response:
    body = {"model": model, "max_output_tokens": 24, "temperature": 0, **CASES[name], **more}
    answer = http.post(PATH, json=body)
    if answer.status_code in (404, 405):
        absent(PATH)
    assert answer.status_code == 200, answer.text
    return answer


def streamed(http: httpx.Client, model: str, name: str, **more: Any) -> list[dict[str, Any]]:
    return check_stream(post(http, model, name, stream=True, **more).text)


@pytest.mark.parametrize("name", list(CASES))
def test_a_response_and_every_event_of_its_stream_are_valid(
    http: httpx.Client, model: str, name: str
) -> None:
    response = check_response(post(http, model, name).content)
    assert response["output"]
    for field, value in CASES[name].items():
        if field in response and field not in ("input", "tools"):
            assert response[field] == value
    assert (response["completed_at"] is not None) == (response["status"] == "completed")
    events = streamed(http, model, name)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    last = events[-1]["response"]
    assert events[-1]["type"] == f"response.{last['status']}"
    for event in events[:2]:
        assert (event["response"]["status"], event["response"]["output"]) == ("in_progress", [])
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == last["output"]
    changing = ("id", "created_at", "completed_at", "call_id")

    def without_ids(response: dict[str, Any]) -> dict[str, Any]:
        items = [{k: v for k, v in i.items() if k not in changing} for i in response["output"]]
        kept = {k: v for k, v in response.items() if k not in (*changing, "usage")}
        return {**kept, "output": items}

    assert without_ids(last) == without_ids(response)


@pytest.mark.parametrize("name", ["tool calling", "tool named"])
def test_a_call_comes_as_events_of_its_own(http: httpx.Client, model: str, name: str) -> None:
    events = streamed(http, model, name, max_output_tokens=60)
    (call,) = events[-1]["response"]["output"]
    assert (call["type"], call["name"]) == ("function_call", "set_lamp")
    assert set(json.loads(call["arguments"])) == {"lit"}
    kinds = [event["type"] for event in events[2:-1]]
    assert kinds[0] == "response.output_item.added"
    assert kinds[-2:] == ["response.function_call_arguments.done", "response.output_item.done"]
    assert set(kinds[1:-2]) == {"response.function_call_arguments.delta"}


def test_an_item_that_was_cut_is_incomplete(http: httpx.Client, model: str) -> None:
    for stream in (False, True):
        answer = post(http, model, "basic", max_output_tokens=2, stream=stream)
        response = (
            check_stream(answer.text)[-1]["response"] if stream else check_response(answer.content)
        )
        assert response["status"] == "incomplete"
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in response["output"]] == ["incomplete"]
        assert response["completed_at"] is None


def test_log_probabilities_cover_the_text(http: httpx.Client, model: str) -> None:
    events = streamed(http, model, "log probabilities")
    (done,) = [event for event in events if event["type"] == "response.output_text.done"]
    (item,) = events[-1]["response"]["output"]
    assert done["logprobs"] == item["content"][0]["logprobs"]
    assert len(done["logprobs"]) == events[-1]["response"]["usage"]["output_tokens"]
    for found in done["logprobs"]:
        assert bytes(found["bytes"]).decode(errors="backslashreplace") == found["token"]
        assert len(found["top_logprobs"]) == 2


@pytest.mark.parametrize("name", ["multi-turn", "tool output"])
def test_a_compacted_window_goes_on(http: httpx.Client, model: str, name: str) -> None:
    body = {"model": model, "input": CASES[name]["input"], "instructions": "Keep all names."}
    answer = http.post(f"{PATH}/compact", json=body)
    if answer.status_code in (404, 405):
        absent(f"{PATH}/compact")
    assert answer.status_code == 200, answer.text
    window = check_compacted(answer.content)["output"]
    assert window[-1]["type"] == "compaction"
    users = [item for item in window if item.get("role") == "user"]
    assert "".join(part["text"] for item in users for part in item["content"]) == "".join(
        item["content"] for item in CASES[name]["input"] if item.get("role") == "user"
    )
    for stream in (False, True):
        turns = {"input": [*window, user("And now?")]}
        answer = post(http, model, "basic", stream=stream, **turns)
        if stream:
            check_stream(answer.text)
        else:
            assert check_response(answer.content)["output"]


@pytest.mark.parametrize("name", ["basic", "text", "multi-turn", "tool output"])
def test_tokens_are_counted(http: httpx.Client, model: str, name: str) -> None:
    answer = http.post(f"{PATH}/input_tokens", json={"model": model, **CASES[name]})
    if answer.status_code in (404, 405):
        absent(f"{PATH}/input_tokens")
    assert answer.status_code == 200, answer.text
    usage = check_response(post(http, model, name).content)["usage"]
    assert answer.json() == {
        "object": "response.input_tokens",
        "input_tokens": usage["input_tokens"],
    }
