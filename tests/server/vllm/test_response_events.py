"""The events of a response, from vLLM's serving class over scripted engine outputs."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from openai.types.responses import FunctionTool
from transformers import AutoTokenizer
from vllm import RequestOutput, SamplingParams
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.outputs import CompletionOutput
from vllm.parser import ParserManager

from default_model.paths import CHECKPOINT
from server.errors import DrainingError
from server.request.endpoints import route_of
from server.request.record import RequestRecord
from server.vllm.handlers import adapted
from server.vllm.responses import response_frames

pytestmark = pytest.mark.engine

CALL = '<tool_call>{"name": "look", "arguments": {"at": "a"}}</tool_call>'
OTHER_CALL = CALL.replace('"a"', '"b"')
THOUGHT = "I think.</think>"
TOOL = FunctionTool(type="function", name="look", parameters={"type": "object"}, strict=None)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(CHECKPOINT)
    made.add_tokens(["<think>", "</think>"])
    return made


def serving(*, thinks: bool) -> Any:
    made: Any = OpenAIServingResponses.__new__(OpenAIServingResponses)
    made.parser = ParserManager.get_parser(
        tool_parser_name="hermes",
        reasoning_parser_name="deepseek_r1" if thinks else None,
        enable_auto_tools=True,
    )
    made.use_harmony, made.tool_server = False, None
    made.enable_auto_tools, made.enable_log_outputs = True, False
    return adapted(made)


async def outputs(
    context: SimpleContext, ids: list[int], tokenizer: Any, finish: str
) -> AsyncGenerator[SimpleContext, None]:
    """Yield one token a step, as the engine does."""
    for place, token in enumerate(ids):
        last = place == len(ids) - 1
        output = CompletionOutput(
            index=0,
            text=tokenizer.decode([token], skip_special_tokens=True),
            token_ids=[token],
            cumulative_logprob=None,
            logprobs=None,
            finish_reason=finish if last else None,
        )
        context.append_output(
            RequestOutput("r", "", [1], None, [output], finished=last, num_cached_tokens=0)
        )
        yield context


async def events_of(
    text: str, tokenizer: Any, *, thinks: bool = False, finish: str = "stop"
) -> list[dict[str, Any]]:
    served = serving(thinks=thinks)
    request = ResponsesRequest(input="hi", model="m", stream=True, store=False, tools=[TOOL])
    context = SimpleContext(response_parser=served.parser(tokenizer, request.tools))
    ids = tokenizer.encode(text, add_special_tokens=False)
    made = served.responses_stream_generator(
        request,
        SamplingParams(max_tokens=100),
        outputs(context, ids, tokenizer, finish),
        context,
        "m",
        tokenizer,
        None,
    )
    frames = [frame async for frame in response_frames(made, {}, None)]
    events = [json.loads(frame.partition("\ndata: ")[2]) for frame in frames]
    for frame, event in zip(frames, events, strict=True):
        assert frame.startswith(f"event: {event['type']}\n")
    return events


def check_agreement(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Assert that all events agree with the last; return the items of that."""
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output: list[dict[str, Any]] = events[-1]["response"]["output"]
    added = [event["item"] for event in events if event["type"] == "response.output_item.added"]
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output
    assert [item["id"] for item in added] == [item["id"] for item in output]
    assert len({item["id"] for item in output}) == len(output)
    for place, item in enumerate(output):
        assert added[place].get("call_id") == item.get("call_id")
        assert item["id"].startswith(
            {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}[item["type"]]
        )
        own = [event for event in events if event.get("output_index") == place]
        assert {event["item_id"] for event in own if "item_id" in event} == {item["id"]}
        streamed = "".join(event["delta"] for event in own if event["type"].endswith(".delta"))
        if item["type"] == "function_call":
            assert streamed == item["arguments"]
        else:
            assert streamed == item["content"][0]["text"]
    return output


KINDS = [
    ("Hello there.", False, ["message"]),
    (CALL, False, ["function_call"]),
    ("I look. " + CALL + OTHER_CALL, False, ["message", "function_call", "function_call"]),
    (THOUGHT + "Hello.", True, ["reasoning", "message"]),
    (THOUGHT + "I look. " + CALL, True, ["reasoning", "message", "function_call"]),
    (THOUGHT + CALL, True, ["reasoning", "function_call"]),
]


@pytest.mark.parametrize(("text", "thinks", "kinds"), KINDS)
async def test_items_keep_their_ids(
    tokenizer: Any, text: str, thinks: bool, kinds: list[str]
) -> None:
    output = check_agreement(await events_of(text, tokenizer, thinks=thinks))
    assert [item["type"] for item in output] == kinds
    assert {item["status"] for item in output} == {"completed"}


@pytest.mark.parametrize(("text", "thinks"), [(kind[0], kind[1]) for kind in KINDS])
async def test_an_answer_cut_anywhere_is_one_story(tokenizer: Any, text: str, thinks: bool) -> None:
    ids = tokenizer.encode(text, add_special_tokens=False)
    for length in range(1, len(ids)):
        cut = tokenizer.decode(ids[:length])
        events = await events_of(cut, tokenizer, thinks=thinks, finish="length")
        assert events[-1]["type"] == "response.incomplete"
        output = check_agreement(events)
        for item in output[:-1]:
            assert item["status"] == "completed"
        if output and output[-1]["type"] != "function_call":
            assert output[-1]["status"] == "incomplete"


async def test_an_answer_without_text_has_no_items(tokenizer: Any) -> None:
    assert check_agreement(await events_of(tokenizer.eos_token, tokenizer)) == []


async def test_a_stream_that_fails_says_so_in_two_events(tokenizer: Any) -> None:
    record = RequestRecord(route_of("/v1/responses"), "POST", 0.0)
    served = serving(thinks=False)
    request = ResponsesRequest(input="hi", model="m", stream=True, store=False)
    context = SimpleContext(response_parser=None)
    ids = tokenizer.encode("Hello there.", add_special_tokens=False)
    made = served.responses_stream_generator(
        request,
        SamplingParams(max_tokens=100),
        outputs(context, ids, tokenizer, "stop"),
        context,
        "m",
        tokenizer,
        None,
    )
    frames = response_frames(made, {"store": False}, record)
    begun = [await anext(frames) for _ in range(5)]
    await frames.aclose()
    assert record.failure_frames is not None
    text = "".join(begun) + record.failure_frames(DrainingError("The server ends."))
    events = [json.loads(part.partition("\ndata: ")[2]) for part in text.split("\n\n")[:-1]]
    assert [event["sequence_number"] for event in events] == list(range(7))
    assert [event["type"] for event in events[-2:]] == ["error", "response.failed"]
    assert events[-2]["error"]["code"] == events[-2]["code"] == "draining"
    failed = events[-1]["response"]
    assert (failed["status"], failed["store"]) == ("failed", False)
    assert failed["error"] == {"code": "draining", "message": "The server ends."}
    assert failed["id"] == events[0]["response"]["id"]
