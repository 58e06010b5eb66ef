"""What goes wrong in vLLM's streams comes out of them as the exception that it was."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.entrypoints.anthropic import serving as anthropic
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import GenerationError, VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from server.errors import (
    ContextLengthError,
    EngineFailedError,
    InternalError,
    InvalidValueError,
    OverloadedError,
    ServerError,
    UnsupportedOperationError,
)
from server.vllm.errors import BacklogError, RefusedError, RequestContext, from_exception
from server.vllm.handlers import adapted
from server.vllm.messages import message_events

pytestmark = pytest.mark.engine

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


def completion(results: AsyncIterator[Any]) -> Any:
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


@pytest.mark.parametrize("stream", [chat, completion, responses, messages])
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
