"""The chunk of a chat stream that carries a piece of text, without a model for each of its parts.

vLLM makes three pydantic models of every token and serialises them: most of what its serving class
costs per token. Nearly all chunks of all streams differ in one string alone. The makers here take
the place of those models in vLLM's serving module; whatever is more than a piece of text still
becomes vLLM's own. Frames are the same to the byte (tests/http/test_stream_chunks.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from types import ModuleType
from typing import Any

from pydantic_core import to_json

_IDLE = ("logprobs", "finish_reason", "token_ids")
_CHOICE = {"index", "delta", *_IDLE}
_CHUNK = {"id", "object", "created", "choices", "model"}
# Fields that are set on a finished chunk.
_LATER = ("usage", "system_fingerprint")


def install(serving: ModuleType) -> None:
    """Put the makers in the place of the models in `serving`, vLLM's module; idempotent."""
    if isinstance(serving.DeltaMessage, type):
        makers = ChunkMakers(
            serving.DeltaMessage,
            serving.ChatCompletionResponseStreamChoice,
            serving.ChatCompletionStreamResponse,
        )
        serving.DeltaMessage = makers.delta  # type: ignore[attr-defined]
        serving.ChatCompletionResponseStreamChoice = makers.choice  # type: ignore[attr-defined]
        serving.ChatCompletionStreamResponse = makers.chunk  # type: ignore[attr-defined]


@dataclass(slots=True)
class TextDelta:
    """A delta of text; the rest is what vLLM looks at before it sends one."""

    content: str
    role: None = None
    reasoning: None = None
    tool_calls: tuple[()] = ()


@dataclass(slots=True)
class TextChoice:
    """A choice with a delta of text that does not end it."""

    index: int
    delta: TextDelta
    finish_reason: None = None


class ChunkMakers:
    """Called as the models are: with keywords."""

    def __init__(self, delta: Any, choice: Any, chunk: Any) -> None:
        self._delta, self._choice, self._chunk = delta, choice, chunk

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
        if fields.keys() == _CHOICE and all(fields[name] is None for name in _IDLE):
            return TextChoice(fields["index"], delta)
        return self._choice(**{**fields, "delta": self._delta(content=delta.content)})

    def chunk(self, **fields: Any) -> Any:
        """Make a ChatCompletionStreamResponse."""
        if fields.keys() == _CHUNK and [type(c) for c in fields["choices"]] == [TextChoice]:
            return TextChunk(self, fields)
        return self.whole(fields)

    def whole(self, fields: dict[str, Any]) -> Any:
        """Make vLLM's own chunk of fields that may hold choices of ours."""
        choices = [
            self._choice(
                index=choice.index,
                delta=self._delta(content=choice.delta.content),
                **dict.fromkeys(_IDLE),
            )
            if type(choice) is TextChoice
            else choice
            for choice in fields["choices"]
        ]
        return self._chunk(**{**fields, "choices": choices})


class TextChunk:
    """A chunk with one TextChoice."""

    __slots__ = ("_fields", "_makers", *_LATER)

    def __init__(self, makers: ChunkMakers, fields: dict[str, Any]) -> None:
        self._makers, self._fields = makers, fields

    def model_dump_json(self, **options: Any) -> str:
        """Return what vLLM's model would."""
        later = {name: getattr(self, name) for name in _LATER if hasattr(self, name)}
        fields = self._fields
        if later or options != {"exclude_unset": True}:
            whole = self._makers.whole(fields)
            for name, value in later.items():
                setattr(whole, name, value)
            return str(whole.model_dump_json(**options))
        choice: TextChoice = fields["choices"][0]
        head = _head(fields["id"], fields["object"], fields["created"], fields["model"])
        text = to_json(choice.delta.content).decode()
        return f'{head}{choice.index},"delta":{{"content":{text}}},{_TAIL}'


_TAIL = '"logprobs":null,"finish_reason":null,"token_ids":null}]}'


@lru_cache(maxsize=1024)
def _head(identifier: str, kind: str, created: int, model: str) -> str:
    """Return what all chunks of a stream begin with."""
    same = {"id": identifier, "object": kind, "created": created, "model": model}
    return to_json(same).decode()[:-1] + ',"choices":[{"index":'
