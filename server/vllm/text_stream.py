"""Text of plain streams, past vLLM's models, outputs and generators.

vLLM makes two or three pydantic models of every token and serialises them: most of what its serving
classes cost per token. Nearly all chunks of all streams differ in one string alone. The makers here
take the place of those models in vLLM's serving modules; whatever is more than a piece of text
still becomes vLLM's own. Frames are the same to the byte (tests/server/vllm/test_streams.py).

Once a stream's first frame is known, `DirectState` pushes later texts into it where the engine's
output arrives (`server.wire.DirectFrames`), past the stream's task and its generators.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from pydantic_core import to_json
from vllm.outputs import PoolingRequestOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.engine.output_processor import RequestState

from server.request.record import record_var
from server.vllm.patches import make_chat_chunks, make_completion_chunks, use_request_state
from server.vllm.sampling import add_prediction_counts
from server.wire import DirectFrames

_CHUNK = {"id", "object", "created", "choices", "model"}
_OPTIONS = {"exclude_unset": True}
"""The options with which vLLM serialises a stream's chunks."""
# Fields of a choice that are null while it is only text.
_CHAT_IDLE = ("logprobs", "finish_reason", "token_ids")
_COMPLETION_IDLE = ("logprobs", "finish_reason", "stop_reason", "prompt_token_ids", "token_ids")


def install() -> None:
    """Replace the models in vLLM's modules by the makers; idempotent."""

    def chats(delta: Any, choice: Any, chunk: Any) -> Sequence[object]:
        makers = ChatMakers(delta, choice, chunk)
        return (
            _in_place_of(delta, TextDelta, makers.delta),
            _in_place_of(choice, TextChoice, makers.choice),
            _in_place_of(chunk, TextChunk, makers.chunk),
        )

    def completions(choice: Any, chunk: Any) -> Sequence[object]:
        makers = CompletionMakers(choice, chunk)
        return (
            _in_place_of(choice, TextChoice, makers.choice),
            _in_place_of(chunk, TextChunk, makers.chunk),
        )

    make_chat_chunks(chats)
    make_completion_chunks(completions)


def _in_place_of(model: Any, substitute: type, make: Callable[..., Any]) -> object:
    """Return an object that is called like `model` and stands for its class in `isinstance`."""

    class Maker:
        # A bound method: the call costs no frame of its own.
        __call__ = make

        def __instancecheck__(self, instance: object) -> bool:
            return isinstance(instance, (model, substitute))

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


class CompletionMakers:
    """Replaces vLLM's completion models; called with the same keywords.

    ``around``: the JSON of a choice before and after its text.
    """

    def __init__(self, choice: Any, chunk: Any) -> None:
        self._choice, self._chunk = choice, chunk
        self.around = '"text":', "," + _tail(_COMPLETION_IDLE)

    def choice(self, **fields: Any) -> Any:
        if _is_text(fields, _COMPLETION_IDLE):
            return TextChoice(fields["index"], fields["text"])
        return self._choice(**fields)

    def chunk(self, **fields: Any) -> Any:
        if fields.keys() == _CHUNK and [type(c) for c in fields["choices"]] == [TextChoice]:
            return TextChunk(self, fields)
        return self.whole(fields)

    def whole(self, fields: dict[str, Any]) -> Any:
        """Make vLLM's own chunk of fields that may hold choices of ours."""
        choices = [self._own(one) if type(one) is TextChoice else one for one in fields["choices"]]
        return self._chunk(**{**fields, "choices": choices})

    def _own(self, choice: TextChoice) -> Any:
        idle = dict.fromkeys(_COMPLETION_IDLE)
        return self._choice(index=choice.index, text=choice.text, **idle)


class ChatMakers(CompletionMakers):
    """Replaces vLLM's chat models."""

    def __init__(self, delta: Any, choice: Any, chunk: Any) -> None:
        super().__init__(choice, chunk)
        self._delta = delta
        self.around = '"delta":{"content":', "}," + _tail(_CHAT_IDLE)

    def delta(self, **fields: Any) -> Any:
        if len(fields) == 1 and type(fields.get("content")) is str:
            return TextDelta(fields["content"])
        return self._delta(**fields)

    def choice(self, **fields: Any) -> Any:
        delta = fields["delta"]
        if type(delta) is not TextDelta:
            return self._choice(**fields)
        if _is_text(fields, _CHAT_IDLE):
            return TextChoice(fields["index"], delta.content)
        return self._choice(**{**fields, "delta": self._delta(content=delta.content)})

    def chunk(self, **fields: Any) -> Any:
        # vLLM gives the usage of a whole answer here.
        if (usage := fields.get("usage")) is not None:
            add_prediction_counts(usage)
        return super().chunk(**fields)

    def _own(self, choice: TextChoice) -> Any:
        delta = self._delta(content=choice.text)
        return self._choice(index=choice.index, delta=delta, **dict.fromkeys(_CHAT_IDLE))


def _is_text(fields: dict[str, Any], idle: tuple[str, ...]) -> bool:
    """Return True if a choice has all fields: an index, a text and nulls."""
    if len(fields) != len(idle) + 2:
        return False
    for name in idle:  # noqa: SIM110 (for each token; a generator would cost more than all of it)
        # A name that is missing is something else.
        if fields.get(name, name) is not None:
            return False
    return True


@dataclass(slots=True)
class TextChunk:
    """A chunk with one TextChoice; vLLM may set the last two attributes afterwards."""

    makers: CompletionMakers
    fields: dict[str, Any]
    usage: Any = None
    system_fingerprint: str | None = None

    def model_dump_json(self, **options: Any) -> str:
        """Return the JSON that vLLM's model would have."""
        fields = self.fields
        if options != _OPTIONS or self.usage is not None or self.system_fingerprint is not None:
            whole = self.makers.whole(fields)
            for name in ("usage", "system_fingerprint"):
                if (value := getattr(self, name)) is not None:
                    setattr(whole, name, value)
            return str(whole.model_dump_json(**options))
        choice: TextChoice = fields["choices"][0]
        head = _head(fields["id"], fields["object"], fields["created"], fields["model"])
        text = to_json(choice.text).decode()
        before, after = self.makers.around
        if (record := record_var.get()) is not None:
            record.direct.note_text(text, after)
        return f"{head}{choice.index},{before}{text}{after}"


def _tail(names: tuple[str, ...]) -> str:
    """Return the end of a chunk whose choice is only text: nulls, in the order of vLLM's fields."""
    return ",".join(f'"{name}":null' for name in names) + "}]}"


@lru_cache(maxsize=1024)
def _head(identifier: str, kind: str, created: int, model: str) -> str:
    same = {"id": identifier, "object": kind, "created": created, "model": model}
    return to_json(same).decode()[:-1] + ',"choices":[{"index":'


class DirectState(RequestState):
    """vLLM's state of a request, with the stream that its texts may be pushed to."""

    direct: DirectFrames
    pushed: list[int]
    """Tokens that vLLM's generator has not counted: their texts were pushed, or come at once."""
    parts_left: int
    """Outputs before the last of the step that brings them: one text for all of them."""

    def make_request_output(
        self,
        new_token_ids: list[int],
        pooling_output: Any,
        finish_reason: FinishReason | None,
        *args: Any,
        **kwargs: Any,
    ) -> RequestOutput | PoolingRequestOutput | None:
        """Push a text, or return the output that vLLM makes; the arguments are vLLM's."""
        if finish_reason is None and self.parts_left:
            self.parts_left -= 1
            self.pushed += new_token_ids
            return None
        # The stream must have taken all earlier outputs.
        is_read = self.queue is not None and self.queue.output is None
        writer = self.direct.writer
        if finish_reason is None and writer is not None and is_read and writer.is_ready:
            assert self.detokenizer is not None
            # vLLM's generators know what becomes of an empty text, and take it once more.
            if text := self.detokenizer.get_next_output_text(finished=False, delta=True):
                self.direct.push(text)
                self.pushed += new_token_ids
                return None
        if self.pushed:
            new_token_ids = [*self.pushed, *new_token_ids]
            self.pushed = []
        return super().make_request_output(
            new_token_ids, pooling_output, finish_reason, *args, **kwargs
        )


def push_to(state: RequestState, direct: DirectFrames) -> None:
    """Let a new request push its texts to ``direct``, if each output is a text and nothing else."""
    logprobs = state.logprobs_processor
    if (
        state.output_kind is RequestOutputKind.DELTA
        and state.parent_req is None
        and state.stream_interval == 1
        and not state.streaming_input
        and state.detokenizer is not None
        and logprobs is not None
        and logprobs.num_logprobs is None
        and logprobs.num_prompt_logprobs is None
    ):
        use_request_state(state, DirectState)
        assert isinstance(state, DirectState)
        state.direct, state.pushed, state.parts_left = direct, [], 0
