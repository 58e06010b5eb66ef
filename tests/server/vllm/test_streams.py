"""What goes wrong in vLLM's streams comes out of them as the exception that it was."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from openai.types.responses import FunctionTool
from transformers import AutoTokenizer
from vllm import RequestOutput, SamplingParams
from vllm.entrypoints.anthropic import serving as anthropic
from vllm.entrypoints.openai.chat_completion import serving
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion import serving as completion
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.context import SimpleContext
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.parser import ParserManager
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.tokenizers.hf import CachedHfTokenizer
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.logprobs import LogprobsProcessor
from vllm.v1.outputs import LogprobsTensors

from default_model.paths import CHECKPOINT
from server.errors import (
    ContextLengthError,
    DrainingError,
    EngineFailedError,
    InternalError,
    InvalidValueError,
    OverloadedError,
    ServerError,
    UnsupportedOperationError,
)
from server.request.endpoints import get_route
from server.request.record import RequestRecord
from server.vllm import logprobs as kept_texts
from server.vllm.errors import BacklogError, RefusedError, RequestContext, from_exception
from server.vllm.handlers import adapted
from server.vllm.logprobs import AnswerLogprobs, PlacedLogprob, TokenTexts
from server.vllm.messages import message_events
from server.vllm.responses import Responses, response_frames
from server.vllm.sampling import MAX_ENTRIES, check_logprobs
from server.vllm.serving import Chats
from server.vllm.text_stream import ChatMakers, CompletionMakers, TextChunk, install
from tests.checkpoints import CheckpointCache

HI: list[Any] = [{"role": "user", "content": "hi"}]
Stream = Callable[[AsyncIterator[Any]], AsyncGenerator[Any, None]]


def bare(serving: type[Any]) -> Any:
    """A serving instance as the front end has it, with what its streams read and no engine."""
    made = serving.__new__(serving)
    made.parser_cls, made.enable_force_include_usage, made.use_harmony = None, False, False
    made.parser = None
    return adapted(made)


def chat(results: AsyncIterator[Any], serving: type[Any] = OpenAIServingChat) -> Any:
    request = ChatCompletionRequest(messages=HI, model="m", stream=True)
    made: Any = bare(serving)
    return made.chat_completion_stream_generator(request, results, "id", "m", [], None, None)


def streamed_completion(results: AsyncIterator[Any]) -> Any:
    request = CompletionRequest(prompt="hi", model="m", stream=True)
    made = bare(OpenAIServingCompletion)
    return made.completion_stream_generator(request, [], results, "id", 1, "m", 1, None, None)


def responses(results: AsyncIterator[Any]) -> Any:
    request = ResponsesRequest(input="hi", model="m", stream=True)
    made = bare(OpenAIServingResponses)
    params = SamplingParams()
    return made.responses_stream_generator(request, params, results, None, "m", None, None)


def messages(results: AsyncIterator[Any]) -> Any:
    made = chat(results, anthropic.AnthropicServingMessages)
    return message_events(made, None, lambda: (0, 0), "standard")


async def failing(error: Exception) -> AsyncGenerator[Any, None]:
    raise error
    yield


async def raised_in(stream: AsyncGenerator[Any, None]) -> Exception:
    """What ends a stream; none of its frames may tell it."""
    with pytest.raises(Exception) as caught:
        async for frame in stream:
            assert "error" not in str(frame).partition("response=")[0]
    return caught.value


@pytest.mark.parametrize("stream", [chat, streamed_completion, responses, messages])
@pytest.mark.parametrize(
    "error",
    [
        EngineDeadError(),
        EngineGenerateError(),
        GenerationError(),
        BacklogError(70000, 65536),
        VLLMValidationError("too long", parameter="input_tokens"),
        ValueError("wrong"),
        RuntimeError("a fault"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_every_stream_raises_the_object(stream: Stream, error: Exception) -> None:
    assert await raised_in(stream(failing(error))) is error


async def test_faults_of_the_converter_itself_are_raised() -> None:
    async def frames(text: str) -> AsyncGenerator[str, None]:
        yield text

    for broken in ("data: {no json\n\n", "no frame"):
        assert isinstance(
            await raised_in(message_events(frames(broken), None, lambda: (0, 0), "standard")),
            ValueError,
        )


CONTEXT = RequestContext({"prompt": "hi"}, "prompt")


@pytest.mark.parametrize(
    ("error", "ours", "param"),
    [
        (EngineDeadError(), EngineFailedError, None),
        (BacklogError(70000, 65536), OverloadedError, None),
        (VLLMValidationError("x", parameter="input_tokens"), ContextLengthError, "prompt"),
        (GenerationError(), InternalError, None),
        (RefusedError("x", 500), InternalError, None),
        (RefusedError("x", 501, "p"), UnsupportedOperationError, "p"),
        (RefusedError("x", 503), OverloadedError, None),
        (RefusedError("x", 400, "input_tokens"), ContextLengthError, "prompt"),
        (RefusedError("x", 400, "top_k"), InvalidValueError, "top_k"),
    ],
)
def test_what_a_client_is_told_is_decided_by_class(
    error: Exception, ours: type[ServerError], param: str | None
) -> None:
    translated = from_exception(error, CONTEXT)
    assert (type(translated), translated.param) == (ours, param)


@pytest.mark.parametrize(
    ("parameter", "fields", "param", "message"),
    [
        ("logprobs", {"top_logprobs": 99}, "top_logprobs", "'top_logprobs': too many"),
        ("logprobs", {"logprobs": 99}, "logprobs", "'logprobs': too many"),
        ("extra_args", {"vllm_xargs": {"a": 2**70}}, "vllm_xargs", "'vllm_xargs': too many"),
        ("max_tokens", {"max_output_tokens": 0}, "max_output_tokens", "'max_output_tokens': "),
    ],
)
def test_an_error_names_the_field_that_was_sent(
    parameter: str, fields: dict[str, Any], param: str, message: str
) -> None:
    error = VLLMValidationError("too many", parameter=parameter)
    found = from_exception(error, RequestContext(fields, "prompt"))
    assert (type(found), found.param) == (InvalidValueError, param)
    assert found.message.startswith(message)


# ------------------------------------------------------------------------------------ stream chunks
MODELS = {
    name: getattr(serving, name)
    for name in (
        "DeltaMessage",
        "ChatCompletionResponseStreamChoice",
        "ChatCompletionStreamResponse",
    )
}
OURS = ChatMakers(*MODELS.values())
PLAIN = {"logprobs": None, "finish_reason": None, "token_ids": None}


def dump(
    makers: Any,
    delta: dict[str, Any],
    choice: dict[str, Any],
    later: dict[str, Any],
    **options: Any,
) -> tuple[str, type]:
    """Make a chunk as vLLM's generator does; `makers` have the models' places."""
    make_delta, make_choice, make_chunk = makers
    chunk = make_chunk(
        id="chatcmpl-1é",
        object="chat.completion.chunk",
        created=1_700_000_000,
        choices=[make_choice(index=1, delta=make_delta(**delta), **choice)],
        model='a "model"',
    )
    for name, value in later.items():
        setattr(chunk, name, value)
    return chunk.model_dump_json(**({"exclude_unset": True} | options)), type(chunk)


def both(
    delta: dict[str, Any], choice: dict[str, Any], later: dict[str, Any], **options: Any
) -> tuple[str, str, type]:
    theirs, _ = dump(MODELS.values(), delta, choice, later, **options)
    ours, kind = dump((OURS.delta, OURS.choice, OURS.chunk), delta, choice, later, **options)
    return ours, theirs, kind


@pytest.mark.parametrize(
    "text", ["", "word", 'say "hi"\\ \n\r\t', "\x00\x1f\x7f", "é漢字🙂", "\u2028</script>"]
)
def test_text_is_written_as_vllm_writes_it(text: str) -> None:
    ours, theirs, kind = both({"content": text}, PLAIN, {})
    assert ours == theirs
    assert kind is TextChunk


@pytest.mark.parametrize(
    ("delta", "choice", "later"),
    [
        ({"role": "assistant", "content": ""}, PLAIN, {}),
        ({"content": "x"}, {**PLAIN, "finish_reason": "stop", "stop_reason": 7}, {}),
        ({"content": "x"}, {**PLAIN, "token_ids": [3]}, {}),
        ({"content": "x"}, {"logprobs": None, "finish_reason": None}, {}),
        ({"content": "x"}, PLAIN, {"system_fingerprint": "fp"}),
        ({"reasoning": "x"}, PLAIN, {}),
        ({}, PLAIN, {}),
    ],
)
def test_anything_else_is_vllms_own(
    delta: dict[str, Any], choice: dict[str, Any], later: dict[str, Any]
) -> None:
    ours, theirs, _ = both(delta, choice, later)
    assert ours == theirs


def test_usage_that_is_set_later_is_in_the_chunk() -> None:
    usage = {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}
    ours, theirs, _ = both({"content": "x"}, PLAIN, {"usage": serving.UsageInfo(**usage)})
    assert ours == theirs
    assert '"total_tokens":3' in ours


def test_other_options_of_the_dump_are_respected() -> None:
    ours, theirs, _ = both({"content": "x"}, PLAIN, {}, exclude_none=True)
    assert ours == theirs
    assert "null" not in ours


def test_the_makers_take_the_models_places_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, model in MODELS.items():
        monkeypatch.setattr(serving, name, model)
    install()
    first = serving.DeltaMessage
    assert first is not MODELS["DeltaMessage"]
    install()
    assert serving.DeltaMessage == first
    assert isinstance(serving.DeltaMessage(role="assistant"), MODELS["DeltaMessage"])
    # What vLLM may ask of a model besides making it.
    delta = serving.DeltaMessage(content="x")
    choice = serving.ChatCompletionResponseStreamChoice(index=0, delta=delta, **PLAIN)
    assert isinstance(delta, serving.DeltaMessage)
    assert isinstance(serving.DeltaMessage(role="assistant"), serving.DeltaMessage)
    assert isinstance(choice, serving.ChatCompletionResponseStreamChoice)
    assert not isinstance(choice, serving.DeltaMessage)
    assert "content" in serving.DeltaMessage.model_fields


COMPLETION = (completion.CompletionResponseStreamChoice, completion.CompletionStreamResponse)
IDLE = ("logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")


def both_completions(
    text: str, choice: dict[str, Any], later: dict[str, Any], **options: Any
) -> tuple[str, str, type]:
    """What vLLM's completion generator would send, from our makers and from its own models."""
    ours = CompletionMakers(*COMPLETION)
    dumps = []
    kind: type = object
    for make_choice, make_chunk in (COMPLETION, (ours.choice, ours.chunk)):
        chunk = make_chunk(
            id="cmpl-1é",
            object="text_completion",
            created=1_700_000_000,
            model='a "model"',
            choices=[make_choice(index=2, text=text, **(dict.fromkeys(IDLE) | choice))],
        )
        for name, value in later.items():
            setattr(chunk, name, value)
        dumps.append(chunk.model_dump_json(**({"exclude_unset": True} | options)))
        kind = type(chunk)
    return dumps[1], dumps[0], kind


@pytest.mark.parametrize("text", ["", "word", 'say "hi"\\ \n', "é漢字🙂"])
def test_text_of_completions_is_written_as_vllm_writes_it(text: str) -> None:
    ours, theirs, kind = both_completions(text, {}, {})
    assert ours == theirs
    assert kind is TextChunk


@pytest.mark.parametrize(
    ("choice", "later", "options"),
    [
        ({"finish_reason": "stop", "stop_reason": 7}, {}, {}),
        ({"prompt_token_ids": [1], "token_ids": [2]}, {}, {}),
        ({}, {"system_fingerprint": "fp"}, {}),
        ({}, {}, {"exclude_none": True}),
    ],
)
def test_anything_else_of_completions_is_vllms_own(
    choice: dict[str, Any], later: dict[str, Any], options: dict[str, Any]
) -> None:
    ours, theirs, _ = both_completions("x", choice, later, **options)
    assert ours == theirs


def test_a_chunk_of_usage_alone_is_vllms_own(monkeypatch: pytest.MonkeyPatch) -> None:
    for model in COMPLETION:
        monkeypatch.setattr(completion, model.__name__, model)
    install()
    install()
    assert completion.CompletionStreamResponse is not COMPLETION[1]
    chunk = completion.CompletionStreamResponse(id="x", created=1, model="m", choices=[])
    assert isinstance(chunk, COMPLETION[1])


# ---------------------------------------------------------------------------------- response events
CALL = '<tool_call>{"name": "look", "arguments": {"at": "a"}}</tool_call>'
OTHER_CALL = CALL.replace('"a"', '"b"')
THOUGHT = "I think.</think>"
TOOL = FunctionTool(type="function", name="look", parameters={"type": "object"}, strict=None)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    made = AutoTokenizer.from_pretrained(CHECKPOINT)
    made.add_tokens(["<think>", "</think>"])
    return made


def event_serving(*, thinks: bool) -> Any:
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


def generated(served: Any, request: Any, text: str, tokenizer: Any, finish: str = "stop") -> Any:
    context = SimpleContext(response_parser=served.parser(tokenizer, request.tools))
    ids = tokenizer.encode(text, add_special_tokens=False)
    steps, params = outputs(context, ids, tokenizer, finish), SamplingParams(max_tokens=100)
    return served.responses_stream_generator(request, params, steps, context, "m", tokenizer, None)


async def events_of(
    text: str, tokenizer: Any, *, thinks: bool = False, finish: str = "stop"
) -> list[dict[str, Any]]:
    served = event_serving(thinks=thinks)
    request = ResponsesRequest(input="hi", model="m", stream=True, store=False, tools=[TOOL])
    made = generated(served, request, text, tokenizer, finish)
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
    record = RequestRecord(get_route("/v1/responses"), "POST", 0.0)
    served = event_serving(thinks=False)
    request = ResponsesRequest(input="hi", model="m", stream=True, store=False)
    made = generated(served, request, "Hello there.", tokenizer)
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


# ----------------------------------------------------------------------------------------- logprobs
LENGTH, TOP = 300, 20
VOCABULARY = 4096


@pytest.fixture(scope="module")
def spelled_tokenizer(checkpoints: CheckpointCache) -> Any:
    return CachedHfTokenizer.from_pretrained(str(checkpoints("llama", dtype="float32")))


def tensors(length: int = LENGTH, top: int = TOP) -> LogprobsTensors:
    """Logprobs of a prompt as the engine sends them; some tokens are bytes of one character."""
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(4, 300, (length, top + 1), generator=random)
    values = -torch.rand((length, top + 1), generator=random).sort(dim=1).values
    values[3, 4] = -torch.inf
    ranks = torch.randint(1, 40, (length,), generator=random)
    return LogprobsTensors(ids, values, ranks)


def processor(tokenizer: Any) -> LogprobsProcessor:
    return LogprobsProcessor(
        tokenizer=tokenizer,
        logprobs=None,
        prompt_logprobs=[None],
        cumulative_logprob=None,
        num_logprobs=None,
        num_prompt_logprobs=TOP,
    )


def test_a_prompts_logprobs_are_returned_every_time(spelled_tokenizer: Any) -> None:
    theirs = processor(spelled_tokenizer)
    lasting = AnswerLogprobs.of(processor(spelled_tokenizer), SimpleNamespace(decode_next=None))
    for one in (theirs, lasting):
        one._update_prompt_logprobs(tensors())
    expected = theirs.pop_prompt_logprobs()
    assert expected is not None
    assert len(expected) == LENGTH + 1
    for _ in range(2):
        found = lasting.pop_prompt_logprobs()
        assert found is not None
        for own, same in zip(found[1:], expected[1:], strict=True):
            assert own is not None
            assert same is not None
            assert {token: (entry.logprob, entry.rank) for token, entry in own.items()} == {
                token: (entry.logprob, entry.rank) for token, entry in same.items()
            }


def serve(kind: str) -> Any:
    """Our serving class of a kind, of which nothing but logprobs is used."""
    ours: Any = object.__new__({"chat": Chats, "response": Responses}[kind])
    ours.return_tokens_as_token_ids = False
    return ours


def sampled(tokenizer: Any, length: int = LENGTH) -> tuple[list[int], list[Any]]:
    """Tokens and logprobs of an answer, of which every other token is not among the likeliest."""
    ids, positions = [], []
    for number in range(length):
        likely = {
            5 + number + rank: Logprob(-float(rank), rank, tokenizer.decode([5 + number + rank]))
            for rank in range(1, TOP + 1)
        }
        token = 3 + number if number % 2 else 5 + number + 2
        one = likely.get(token) or Logprob(-30.0, 999, tokenizer.decode([token]))
        ids.append(token)
        positions.append({token: one, **likely} | {token: PlacedLogprob(**vars(one))})
    return ids, positions


@pytest.mark.parametrize("kind", ["chat", "response"])
@pytest.mark.parametrize("number", [0, 1, 5])
def test_alternatives_are_the_most_likely_tokens(
    spelled_tokenizer: Any, kind: str, number: int
) -> None:
    ours = serve(kind)
    ids, positions = sampled(spelled_tokenizer, 4)
    if kind == "chat":
        made = ours._create_chat_logprobs(
            ids, positions, tokenizer=spelled_tokenizer, num_output_top_logprobs=number
        ).content
    else:
        made = ours._create_response_logprobs(
            ids, positions, tokenizer=spelled_tokenizer, top_logprobs=number
        )
    for entry, token, position in zip(made, ids, positions, strict=True):
        shown = json.loads(entry.model_dump_json())
        assert shown["logprob"] == position[token].logprob
        assert [one["logprob"] for one in shown["top_logprobs"]] == [
            -float(rank) for rank in range(1, number + 1)
        ]


@pytest.mark.parametrize(
    ("params", "length", "name"),
    [
        ({"prompt_logprobs": -1}, MAX_ENTRIES // VOCABULARY + 1, "prompt_logprobs"),
        ({"prompt_logprobs": 99}, MAX_ENTRIES // 100 + 1, "prompt_logprobs"),
        ({"logprobs": -1, "max_tokens": MAX_ENTRIES // VOCABULARY + 1}, 1, "logprobs"),
        ({"logprobs": 99, "max_tokens": 2000, "n": 6, "temperature": 1}, 1, "logprobs"),
    ],
)
def test_an_answer_has_so_many_at_most(params: dict[str, Any], length: int, name: str) -> None:
    prompt = {"prompt_token_ids": [5] * length}
    with pytest.raises(VLLMValidationError, match=f"may have {MAX_ENTRIES}") as caught:
        check_logprobs(SamplingParams(**params), prompt, VOCABULARY)
    assert caught.value.parameter == name


def test_what_is_ordinary_passes() -> None:
    prompt = {"prompt_token_ids": [5] * 40_000}
    check_logprobs(SamplingParams(prompt_logprobs=20, max_tokens=10**6), prompt, VOCABULARY)
    check_logprobs(SamplingParams(logprobs=20, max_tokens=10**6), prompt, VOCABULARY)
    check_logprobs(SamplingParams(logprobs=-1, max_tokens=100), {}, VOCABULARY)


def test_texts_of_tokens_are_kept(spelled_tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = TokenTexts()
    lists = [[5, 5, 200, 4, 255], [200, 7], [], [299, *range(4, 60)]]
    for _ in range(2):
        for tokens in lists:
            found = texts(spelled_tokenizer, tokens)
            theirs = convert_ids_list_to_tokens(spelled_tokenizer, tokens)
            for own, text in zip(found, theirs, strict=True):
                assert own == text if "\ufffd" not in text else own.startswith("\\x")
            # The list is the caller's.
            found[:] = [""] * len(found)
    monkeypatch.setattr(kept_texts, "convert_ids_list_to_tokens", None)
    assert len(texts(spelled_tokenizer, lists[3])) == len(lists[3])
