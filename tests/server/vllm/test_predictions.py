"""Counts of a prediction's tokens in the usage of answers, whole and streamed."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from openai.types import CompletionUsage

from server.request.endpoints import route_of
from server.request.record import Counts, RequestRecord, record_var
from server.vllm.sampling import add_prediction_counts

pytestmark = pytest.mark.engine


@pytest.fixture
def record() -> Iterator[RequestRecord]:

    given = RequestRecord(route_of("/v1/chat/completions"), "POST", time.perf_counter())
    token = record_var.set(given)
    yield given
    record_var.reset(token)


def usage(**more: Any) -> Any:
    from vllm.entrypoints.serve.engine.protocol import UsageInfo

    return UsageInfo(prompt_tokens=3, completion_tokens=9, total_tokens=12, **more)


def details(meter: Counts | None, record: RequestRecord, **more: Any) -> Any:
    record.tokens.prediction = meter
    whole = usage(**more)
    add_prediction_counts(whole)
    return CompletionUsage.model_validate_json(whole.model_dump_json()).completion_tokens_details


def test_a_whole_answers_usage_has_them(record: RequestRecord) -> None:
    found = details(lambda: (7, 2), record)
    assert (found.accepted_prediction_tokens, found.rejected_prediction_tokens) == (7, 2)
    assert details(None, record) is None


def test_what_is_known_of_thinking_stays(record: RequestRecord) -> None:
    from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

    known = CompletionTokenUsageInfo(reasoning_tokens=5)
    found = details(lambda: (7, 2), record, completion_tokens_details=known)
    assert (found.reasoning_tokens, found.accepted_prediction_tokens) == (5, 7)


def test_the_last_chunk_of_a_stream_has_them(record: RequestRecord) -> None:
    from vllm.entrypoints.openai.chat_completion import protocol

    from server.vllm.text_stream import ChatMakers

    makers = ChatMakers(
        object,
        protocol.ChatCompletionResponseStreamChoice,
        protocol.ChatCompletionStreamResponse,
    )
    record.tokens.prediction = lambda: (1, 8)
    chunk = makers.chunk(
        id="a",
        object="chat.completion.chunk",
        created=1,
        choices=[],
        model="m",
        usage=usage(),
        metrics=None,
    )
    told = json.loads(chunk.model_dump_json(exclude_unset=True, exclude_none=True))
    assert told["usage"]["completion_tokens_details"] == {
        "reasoning_tokens": 0,
        "accepted_prediction_tokens": 1,
        "rejected_prediction_tokens": 8,
    }
