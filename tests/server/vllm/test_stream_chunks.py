"""Chunks of text are the same bytes as vLLM's own models make, and nothing else is touched."""

from __future__ import annotations

from typing import Any

import pytest
from vllm.entrypoints.openai.chat_completion import serving
from vllm.entrypoints.openai.completion import serving as completion

from server.vllm.text_stream import (
    ChatMakers,
    CompletionMakers,
    TextChunk,
    install,
)

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
