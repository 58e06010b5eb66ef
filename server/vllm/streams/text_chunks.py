"""The chunk of a stream that carries a piece of text, without a model for each of its parts.

vLLM makes two or three pydantic models of every token and serialises them: most of what its serving
classes cost per token. Nearly all chunks of all streams differ in one string alone. The makers here
take the place of those models in vLLM's serving modules; whatever is more than a piece of text
still becomes vLLM's own. Frames are the same to the byte (tests/server/vllm/test_stream_chunks.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from pydantic_core import to_json

from server.request.record import record_var
from server.vllm.streams.stamps import add_prediction_counts

_CHUNK = {"id", "object", "created", "choices", "model"}
_OPTIONS = {"exclude_unset": True}
"""The options with which vLLM serialises a stream's chunks."""
# Fields of a choice that are null while it is only text.
_CHAT_IDLE = ("logprobs", "finish_reason", "token_ids")
_COMPLETION_IDLE = ("logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")


def install_chat() -> None:
    """Replace the models in vLLM's module by the makers; idempotent."""
    from vllm.entrypoints.openai.chat_completion import serving as chat

    serving: Any = chat
    if isinstance(serving.DeltaMessage, type):
        makers = ChatMakers(
            serving.DeltaMessage,
            serving.ChatCompletionResponseStreamChoice,
            serving.ChatCompletionStreamResponse,
        )
        serving.DeltaMessage = _in_place_of(serving.DeltaMessage, TextDelta, makers.delta)
        serving.ChatCompletionResponseStreamChoice = _in_place_of(
            serving.ChatCompletionResponseStreamChoice, TextChoice, makers.choice
        )
        serving.ChatCompletionStreamResponse = _in_place_of(
            serving.ChatCompletionStreamResponse, TextChunk, makers.chunk
        )


def install_completion() -> None:
    """Replace the models in vLLM's module by the makers; idempotent."""
    from vllm.entrypoints.openai.completion import serving as completion

    serving: Any = completion
    if isinstance(serving.CompletionStreamResponse, type):
        makers = CompletionMakers(
            serving.CompletionResponseStreamChoice, serving.CompletionStreamResponse
        )
        serving.CompletionResponseStreamChoice = _in_place_of(
            serving.CompletionResponseStreamChoice, TextChoice, makers.choice
        )
        serving.CompletionStreamResponse = _in_place_of(
            serving.CompletionStreamResponse, TextChunk, makers.chunk
        )


def _in_place_of(model: Any, made: type, make: Callable[..., Any]) -> object:
    """Return an object that is called like `model` and stands for its class in `isinstance`."""

    class Maker:
        # A bound method: the call costs no frame of its own.
        __call__ = make

        def __instancecheck__(self, given: object) -> bool:
            return isinstance(given, (model, made))

        def __getattr__(self, name: str) -> Any:
            return getattr(model, name)

    return Maker()


@dataclass(slots=True)
class TextDelta:
    """A delta of text, with the other fields that vLLM reads."""

    content: str
    role: None = None
    reasoning: None = None
    tool_calls: tuple[()] = ()


@dataclass(slots=True)
class TextChoice:
    """A choice with a piece of text that does not end it."""

    index: int
    text: str
    finish_reason: None = None


class ChatMakers:
    """Replaces vLLM's chat models; called with the same keywords.

    ``around``: the JSON of a choice before and after its text.
    """

    def __init__(self, delta: Any, choice: Any, chunk: Any) -> None:
        self._delta, self._choice, self._chunk = delta, choice, chunk
        self.around = '"delta":{"content":', "}," + _tail(_CHAT_IDLE)

    def delta(self, **fields: Any) -> Any:
        """Make a DeltaMessage."""
        if len(fields) == 1 and type(fields.get("content")) is str:
            return TextDelta(fields["content"])
        return self._delta(**fields)

    def choice(self, **fields: Any) -> Any:
        """Make a ChatCompletionResponseStreamChoice."""
        delta = fields["delta"]
        if type(delta) is not TextDelta:
            return self._choice(**fields)
        if _is_text(fields, _CHAT_IDLE):
            return TextChoice(fields["index"], delta.content)
        return self._choice(**{**fields, "delta": self._delta(content=delta.content)})

    def chunk(self, **fields: Any) -> Any:
        """Make a ChatCompletionStreamResponse; vLLM gives the usage of a whole answer here."""
        if (usage := fields.get("usage")) is not None:
            add_prediction_counts(usage)
        return _chunk(self, fields)

    def whole(self, fields: dict[str, Any]) -> Any:
        """Make vLLM's own chunk of fields that may hold choices of ours."""
        return self._chunk(**{**fields, "choices": [self._own(c) for c in fields["choices"]]})

    def _own(self, choice: Any) -> Any:
        if type(choice) is not TextChoice:
            return choice
        delta = self._delta(content=choice.text)
        return self._choice(index=choice.index, delta=delta, **dict.fromkeys(_CHAT_IDLE))


class CompletionMakers:
    """Replaces vLLM's completion models; called with the same keywords.

    ``around``: the JSON of a choice before and after its text.
    """

    def __init__(self, choice: Any, chunk: Any) -> None:
        self._choice, self._chunk = choice, chunk
        self.around = '"text":', "," + _tail(_COMPLETION_IDLE)

    def choice(self, **fields: Any) -> Any:
        """Make a CompletionResponseStreamChoice."""
        if _is_text(fields, _COMPLETION_IDLE):
            return TextChoice(fields["index"], fields["text"])
        return self._choice(**fields)

    def chunk(self, **fields: Any) -> Any:
        """Make a CompletionStreamResponse."""
        return _chunk(self, fields)

    def whole(self, fields: dict[str, Any]) -> Any:
        """Make vLLM's own chunk of fields that may hold choices of ours."""
        return self._chunk(**{**fields, "choices": [self._own(c) for c in fields["choices"]]})

    def _own(self, choice: Any) -> Any:
        if type(choice) is not TextChoice:
            return choice
        idle = dict.fromkeys(_COMPLETION_IDLE)
        return self._choice(index=choice.index, text=choice.text, **idle)


def _is_text(fields: dict[str, Any], idle: tuple[str, ...]) -> bool:
    """Return True if a choice has all fields: an index, a text and nulls."""
    if len(fields) != len(idle) + 2:
        return False
    for name in idle:  # noqa: SIM110 (for each token; a generator would cost more than all of it)
        # A name that is missing is something else.
        if fields.get(name, name) is not None:
            return False
    return True


class _Makers(Protocol):
    around: tuple[str, str]

    def whole(self, fields: dict[str, Any]) -> Any: ...


def _chunk(makers: _Makers, fields: dict[str, Any]) -> Any:
    if fields.keys() == _CHUNK and [type(c) for c in fields["choices"]] == [TextChoice]:
        return TextChunk(makers, fields)
    return makers.whole(fields)


class TextChunk:
    """A chunk with one TextChoice; vLLM may set the two public attributes afterwards."""

    __slots__ = ("_fields", "_makers", "system_fingerprint", "usage")

    def __init__(self, makers: _Makers, fields: dict[str, Any]) -> None:
        self._makers, self._fields = makers, fields
        self.usage: Any = None
        self.system_fingerprint: str | None = None

    def model_dump_json(self, **options: Any) -> str:
        """Return the JSON that vLLM's model would have."""
        fields = self._fields
        if options != _OPTIONS or self.usage is not None or self.system_fingerprint is not None:
            return self._whole_json(options)
        choice: TextChoice = fields["choices"][0]
        head = _head(fields["id"], fields["object"], fields["created"], fields["model"])
        text = to_json(choice.text).decode()
        before, after = self._makers.around
        if (record := record_var.get()) is not None:
            record.direct.note_text(text, after)
        return f"{head}{choice.index},{before}{text}{after}"

    def _whole_json(self, options: dict[str, Any]) -> str:
        whole = self._makers.whole(self._fields)
        for name in ("usage", "system_fingerprint"):
            if (value := getattr(self, name)) is not None:
                setattr(whole, name, value)
        return str(whole.model_dump_json(**options))


def _tail(names: tuple[str, ...]) -> str:
    """Return the end of a chunk whose choice is only text: nulls, in the order of vLLM's fields."""
    return ",".join(f'"{name}":null' for name in names) + "}]}"


@lru_cache(maxsize=1024)
def _head(identifier: str, kind: str, created: int, model: str) -> str:
    """Return the common beginning of all chunks of a stream."""
    same = {"id": identifier, "object": kind, "created": created, "model": model}
    return to_json(same).decode()[:-1] + ',"choices":[{"index":'
