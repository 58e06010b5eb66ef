"""vLLM's serving classes of generation, completions and chats, with this server's differences.

vLLM reports `tool_calls` for every answer with a call, also where a limit cut the call, and `stop`
for an answer that ends inside of its reasoning, without the text or the call that is demanded. It
has functions alone: calls of custom tools are made from its calls of those that replace them.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import Any, NoReturn

from pydantic_core import from_json, to_json
from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.chat_completion.protocol import (
    ChatCompletionNamedToolChoiceParam,
    ChatCompletionResponse,
)
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.logprobs import PromptLogprobs
from vllm.outputs import RequestOutput
from vllm.renderers import TokenizeParams
from vllm.tokenizers import TokenizerLike

from server.request.record import record_var
from server.structured_outputs.custom_tools import KIND, InputReader, get_input
from server.tools import Ending, finish_reason
from server.vllm.errors import RefusedError
from server.vllm.logprobs import (
    PlacedLogprob,
    UnsentLogprobs,
    add_bytes,
    most_likely,
    place_beam,
    placed_entries,
    shown_positions,
    text_starts,
    token_bytes,
    token_texts,
)
from server.vllm.tools import demands_answer
from server.wire import JsonObject


class GenerationServing(GenerateBaseServing):
    """Raises the errors of streams; vLLM writes them into a frame, which hides their class."""

    def create_streaming_error_response(
        self,
        message: str | Exception,
        err_type: str = "",  # noqa: ARG002 (the status says as much)
        status_code: HTTPStatus = HTTPStatus.BAD_REQUEST,
        param: str | None = None,
    ) -> NoReturn:
        """Raise the exception, or a `RefusedError` for a message."""
        if isinstance(message, Exception):
            raise message
        raise RefusedError(message, status_code, param)

    def _convert_generation_error_to_streaming_response(self, e: Exception) -> NoReturn:
        raise e

    async def beam_search(
        self, prompt: Any, request_id: str, params: Any, *args: Any, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Search as vLLM does, and place the tokens of beams in their texts.

        The request uses the tokens of its answer's `usage`. The engine's requests, one for each
        beam and token, are no part of it.
        """
        used = [len(prompt.get("prompt_token_ids", ())), 0]
        record = record_var.get()
        if record is not None:
            record.reserve(used[0] + params.beam_width * params.max_tokens)
            record.tokens.used.append(lambda: (used[0], used[1]))
        beams = super().beam_search(prompt, request_id, params, *args, **options)
        async with aclosing(beams) as outputs:
            async for output in outputs:
                for beam in output.outputs:
                    place_beam(beam, self.renderer.tokenizer, skips=params.skip_special_tokens)
                used[1] = sum(len(answer.token_ids) for answer in output.outputs)
                yield output


class EchoedPrompt:
    """The text of one prompt as far as the model reads it, and where its tokens begin in it."""

    def __init__(
        self, tokenizer: TokenizerLike, sent: str | None, rendered: Any, most: int | None
    ) -> None:
        """Read vLLM's `rendered` prompt.

        `given` is the client's text, None for token ids. A prompt that has as many tokens as it
        may have, `most`, was cut.
        """
        self._tokenizer = tokenizer
        self._token_ids: Sequence[int] = rendered["prompt_token_ids"]
        spans = rendered.get("prompt_token_offsets") if sent is not None else None
        if sent is not None and spans is not None and len(self._token_ids) != most:
            self.text, self._starts = sent, _get_starts(spans)
            return
        # The special tokens that the tokenizer adds to a text have an empty span.
        added = {index for index, (begin, end) in enumerate(spans or ()) if begin == end}
        pieces = [(token, index not in added) for index, token in enumerate(self._token_ids)]
        bytes_of = token_bytes(tokenizer)
        self.text = tokenizer.decode([token for token, is_text in pieces if is_text])
        self._starts = text_starts(
            bytes_of.of(token) if is_text else b"" for token, is_text in pieces
        )

    def positions(self, logprobs: PromptLogprobs | None) -> list[dict[int, Any]]:
        """Return the log-probabilities by token, the prompt's own first.

        The first token of a prompt has none; nor has any where the engine returned none.
        """
        placed_positions: list[dict[int, Any]] = []
        known = logprobs or [None] * len(self._token_ids)
        for token, start, position in zip(self._token_ids, self._starts, known, strict=True):
            if position is None:
                (text,) = token_texts(self._tokenizer, [token])
                placed_positions.append({token: PlacedLogprob(None, None, text, start)})
            else:
                one = position[token]
                placed = PlacedLogprob(one.logprob, one.rank, one.decoded_token, start)
                placed_positions.append(
                    {token: placed} | {k: v for k, v in position.items() if k != token}
                )
        return placed_positions


def _get_starts(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Return where tokens begin; `spans` may leave out the space before a word."""
    starts, end = [], 0
    for begin, stop in spans:
        is_added = begin == stop
        starts.append(end if is_added else min(begin, end))
        end = end if is_added else stop
    return starts


class Echo:
    """The prompts of one request, which come before the first text of each answer."""

    def __init__(
        self, request: Any, rendered: Sequence[Any], params: TokenizeParams, tokenizer: Any
    ) -> None:
        """Read vLLM's request and prompts, which `params` have cut."""
        sent = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        most = params.truncate_prompt_tokens
        if most is not None and most < 0:
            most = params.max_input_tokens
        texts = [one if isinstance(one, str) else None for one in sent]
        self._prompts = [
            EchoedPrompt(tokenizer, texts[index], prompt, most)
            for index, prompt in enumerate(rendered)
        ]
        self._answers = request.max_tokens != 0
        self._begun: set[tuple[int, int]] = set()

    def add_to(self, index: int, result: RequestOutput) -> None:
        """Put the prompt of this index before the answers that begin in vLLM's result."""
        prompt = self._prompts[index]
        for output in result.outputs:
            if not self._answers:
                output.text, output.token_ids = "", []
                output.logprobs = None if output.logprobs is None else []
            for position in output.logprobs or ():
                first: Any = next(iter(position.values()))
                if isinstance(first, PlacedLogprob):
                    first.text_offset += len(prompt.text)
            if (index, output.index) not in self._begun:
                self._begun.add((index, output.index))
                output.text = prompt.text + output.text
                if output.logprobs is not None:
                    before = prompt.positions(result.prompt_logprobs)
                    output.logprobs = [*before, *output.logprobs]


class Completions(GenerationServing, OpenAIServingCompletion):
    """Echoes prompts and places the tokens of log-probabilities in the text.

    vLLM's own `echo` leaves the prompt out if token ids are returned, takes the uncut text of a
    cut prompt, and bills a token where it returns the prompt alone.
    """

    async def render_completion_request(self, request: Any) -> Any:
        """Return vLLM's prompts, or its error; `request._echoed` has what is echoed of them."""
        rendered = await super().render_completion_request(request)
        if request.echo and not isinstance(rendered, ErrorResponse):
            params = request.build_tok_params(self.model_config)
            request._echoed = Echo(request, rendered, params, self.renderer.tokenizer)
        return rendered

    def completion_stream_generator(
        self, request: Any, engine_inputs: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        if request.echo:
            result_generator = _echoing(request._echoed, result_generator)
            request = request.model_copy(update={"echo": False})
        return super().completion_stream_generator(
            request, engine_inputs, result_generator, *args, **kwargs
        )

    def request_output_to_completion_response(
        self, final_res_batch: Any, request: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if request.echo:
            for index, result in enumerate(final_res_batch):
                request._echoed.add_to(index, result)
            request = request.model_copy(update={"echo": False})
        return super().request_output_to_completion_response(
            final_res_batch, request, *args, **kwargs
        )

    def _create_completion_logprobs(
        self,
        token_ids: Any,  # noqa: ARG002 (the positions have those of the prompt, too)
        top_logprobs: Any,
        num_output_top_logprobs: int,
        tokenizer: Any,
        logprob_token_ids: list[int] | None = None,
        initial_text_offset: int = 0,  # noqa: ARG002 (as above)
        return_as_token_id: bool | None = None,
    ) -> Any:
        as_id = return_as_token_id
        if as_id is None:
            as_id = self.return_tokens_as_token_ids
        most = None if logprob_token_ids else num_output_top_logprobs + 1
        shown = [
            (
                position[token],
                [
                    (self._get_decoded_token(one, other, tokenizer, as_id), _finite(one))
                    for other, one in list(position.items())[:most]
                ],
            )
            for token, position in shown_positions(top_logprobs)
        ]
        return CompletionLogProbs(
            text_offset=[sampled.text_offset for sampled, _ in shown],
            tokens=[likely[0][0] for _, likely in shown],
            token_logprobs=[_finite(sampled) for sampled, _ in shown],
            top_logprobs=[
                None if sampled.logprob is None else dict(likely) for sampled, likely in shown
            ],
        )


def _finite(one: Any) -> float | None:
    """Return a log-probability, as vLLM -9999 for an infinite one, which JSON lacks."""
    return None if one.logprob is None else max(one.logprob, -9999.0)


async def _echoing(
    echo: Echo, results: AsyncGenerator[Any, None]
) -> AsyncGenerator[tuple[int, Any], None]:
    async with aclosing(results):
        async for index, result in results:
            echo.add_to(index, result)
            yield index, result


_DATA = "data: "
# Parts of a chunk's JSON. No string of it has these quotes without a backslash.
_CALLED = '"finish_reason":"tool_calls"'
_CALLS = '"tool_calls":['
_FINISHED = '"finish_reason":"'


class Chats(GenerationServing, OpenAIServingChat):
    """Reports calls that were cut as such; its parsers are `ObjectCallParser`s."""

    async def chat_completion_stream_generator(
        self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[str, None]:
        parsers: list[Any] = []
        serving: Any = copy.copy(self)
        parser_cls: Any = self.parser_cls
        if parser_cls is not None:

            def make(*args: Any, **kwargs: Any) -> Any:
                parsers.append(parser_cls(*args, **kwargs))
                return parsers[-1]

            make.tool_parser_cls = parser_cls.tool_parser_cls  # type: ignore[attr-defined]
            serving.parser_cls = make
        has_unsent = request.logprobs and request.include_reasoning
        unsent = UnsentLogprobs() if has_unsent else None
        frames = super(Chats, serving).chat_completion_stream_generator(
            request, _with_endings(result_generator, request, parsers, unsent), *args, **kwargs
        )
        named = isinstance(request.tool_choice, ChatCompletionNamedToolChoiceParam)
        async with aclosing(frames) as stream:
            async for frame in stream:
                if unsent is not None:
                    unsent.note_frame(frame)
                yield _corrected(frame, parsers, named=named) if _CALLED in frame else frame

    async def chat_completion_full_generator(
        self, request: Any, result_generator: Any, *args: Any, **kwargs: Any
    ) -> Any:
        parser, endings = kwargs.get("parser"), list[Ending]()
        results = _read_ahead(result_generator, request, parser, self.enable_auto_tools, endings)
        answer = await super().chat_completion_full_generator(request, results, *args, **kwargs)
        if isinstance(answer, ChatCompletionResponse) and parser is not None:
            named = isinstance(request.tool_choice, ChatCompletionNamedToolChoiceParam)
            for choice, ending in zip(answer.choices, endings, strict=True):
                if choice.finish_reason == "tool_calls":
                    calls = [call.function.arguments for call in choice.message.tool_calls]
                    choice.finish_reason = finish_reason(ending, calls, named=named)
        return answer

    def _create_chat_logprobs(
        self,
        token_ids: Sequence[int],  # noqa: ARG002 (the positions have them)
        top_logprobs: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        return placed_entries(super()._create_chat_logprobs, top_logprobs, *args, **options)

    def _get_top_logprobs(
        self, logprobs: Any, top_logprobs: int | None, tokenizer: Any, *args: Any, **options: Any
    ) -> Any:
        if not options.get("return_all"):
            logprobs = most_likely(logprobs, top_logprobs)
        entries = super()._get_top_logprobs(logprobs, top_logprobs, tokenizer, *args, **options)
        add_bytes(entries, logprobs, tokenizer)
        return entries


async def read_whole(parser: Any, output: Any, request: Any, result: Any, auto_tools: bool) -> None:
    """Have a parser read a complete answer, in a thread if it was cut."""
    prompt = result.prompt_token_ids or ()
    if Ending.of(output, request).is_cut:
        await asyncio.to_thread(parser.read_whole, output, request, prompt, auto_tools=auto_tools)
    else:
        parser.read_whole(output, request, prompt, auto_tools=auto_tools)


def mark_unfinished(parser: Any, output: Any, request: Any, result: Any) -> None:
    """Give an answer that ended inside of its reasoning the finish reason of one that was cut.

    Only where the request demands more. The stop reason is the token that ended it.
    """
    if output.finish_reason != "stop" or isinstance(output.stop_reason, str):
        return
    if not demands_answer(request):
        return
    if parser.is_thinking_behind(output, request, result.prompt_token_ids or ()):
        output.finish_reason = "length"
        if output.stop_reason is None and output.token_ids:
            output.stop_reason = output.token_ids[-1]


async def _with_endings(
    results: Any, request: Any, parsers: list[Any], unsent: UnsentLogprobs | None
) -> AsyncGenerator[Any, None]:
    """Yield the results, and set each answer's ending at the parser of its index before."""
    async with aclosing(results):
        async for result in results:
            if unsent is not None:
                unsent.add_to(result)
            for output in result.outputs if parsers else ():
                if output.finish_reason is not None:
                    parser = parsers[output.index]
                    mark_unfinished(parser, output, request, result)
                    parser.ending = Ending.of(output, request)
            yield result


async def _read_ahead(
    results: Any, request: Any, parser: Any, auto_tools: bool, endings: list[Ending]
) -> AsyncGenerator[Any, None]:
    """Yield the results; the last has been parsed, and its endings are in the list."""
    last = None
    async with aclosing(results):
        async for result in results:
            if last is not None:
                yield last
            last = result
    if last is None:
        return
    for output in last.outputs if parser is not None else ():
        mark_unfinished(parser, output, request, last)
        endings.append(Ending.of(output, request))
        await read_whole(parser, output, request, last, auto_tools)
    yield last


def _corrected(frame: str, parsers: list[Any], *, named: bool) -> str:
    (choice,) = from_json(frame[len(_DATA) :])["choices"]
    parser = parsers[choice["index"]]
    calls = [call.arguments for call in parser.streamed.calls]
    reason = finish_reason(parser.ending, calls, named=named)
    return frame.replace(_CALLED, f'"finish_reason":"{reason}"', 1)


def with_custom_calls(body: bytes, names: Collection[str]) -> bytes:
    """Return a whole chat answer whose calls of the tools `names` are those of custom tools."""
    answer: JsonObject = from_json(body)
    for choice in answer["choices"]:
        message = choice["message"]
        calls = message.get("tool_calls") or []
        for call in calls:
            if call["function"]["name"] in names:
                function = call.pop("function")
                custom = {"name": function["name"], "input": get_input(function["arguments"])}
                call |= {"type": KIND, KIND: custom}
        message["tool_calls"] = calls
    return to_json(answer)


async def custom_call_frames(
    frames: AsyncGenerator[str, None], names: Collection[str]
) -> AsyncGenerator[str, None]:
    """Yield the frames of a streamed chat whose calls of `names` are those of custom tools."""
    stream = _CallStream(names)
    async with aclosing(frames):
        async for frame in frames:
            if frame.startswith(_DATA) and (_CALLS in frame or _FINISHED in frame):
                yield stream.converted(frame)
            else:
                yield frame


class _CallStream:
    """Calls of one stream; keys are the numbers of a choice and of a call in it."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._readers: dict[tuple[int, int], InputReader | None] = {}

    def converted(self, frame: str) -> str:
        """Return a frame in which each piece of arguments is one of an input."""
        chunk: JsonObject = from_json(frame[len(_DATA) :].strip())
        for choice in chunk["choices"]:
            delta, number = choice["delta"], choice["index"]
            pieces = [self._piece(number, call) for call in delta.get("tool_calls") or ()]
            if choice.get("finish_reason") is not None:
                pieces += self._rest(number)
            if pieces:
                delta["tool_calls"] = pieces
        return f"{_DATA}{to_json(chunk).decode()}\n\n"

    def _piece(self, number: int, call: Any) -> JsonObject:
        key, function = (number, call["index"]), call.get("function") or {}
        if key not in self._readers:
            custom = function.get("name") in self._names
            self._readers[key] = InputReader() if custom else None
        reader = self._readers[key]
        if reader is None:
            unchanged: JsonObject = call
            return unchanged
        text = {"input": reader.read(function.get("arguments") or "")}
        if function.get("name") is None:
            return {"index": call["index"], KIND: text}
        named = {"name": function["name"], **text}
        return {"index": call["index"], "id": call["id"], "type": KIND, KIND: named}

    def _rest(self, number: int) -> list[JsonObject]:
        rest = [
            (index, reader.end())
            for (choice, index), reader in self._readers.items()
            if choice == number and reader is not None
        ]
        return [{"index": index, KIND: {"input": text}} for index, text in rest if text]
