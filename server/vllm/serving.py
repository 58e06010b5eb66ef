"""vLLM's serving classes of generation and of completions: errors, beams, echoed prompts."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, NoReturn

from vllm.entrypoints.generate.base.serving import GenerateBaseServing
from vllm.entrypoints.openai.completion.protocol import CompletionLogProbs
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.serve.engine.protocol import ErrorResponse

from server.request.record import record_var
from server.vllm.errors import RefusedError
from server.vllm.logprobs import (
    PlacedLogprob,
    place_beam,
    shown_positions,
    text_starts,
    token_bytes,
    token_texts,
)

if TYPE_CHECKING:
    from vllm.logprobs import PromptLogprobs
    from vllm.outputs import RequestOutput
    from vllm.renderers import TokenizeParams
    from vllm.tokenizers import TokenizerLike


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
        self, tokenizer: TokenizerLike, given: str | None, rendered: Any, most: int | None
    ) -> None:
        """Read vLLM's `rendered` prompt.

        `given` is the client's text, None for token ids. A prompt that has as many tokens as it
        may have, `most`, was cut.
        """
        self._tokenizer = tokenizer
        self._token_ids: Sequence[int] = rendered["prompt_token_ids"]
        spans = rendered.get("prompt_token_offsets") if given is not None else None
        if given is not None and spans is not None and len(self._token_ids) != most:
            self.text, self._starts = given, _starts_of(spans)
            return
        # The special tokens that the tokenizer adds to a text have an empty span.
        added = {index for index, (begin, end) in enumerate(spans or ()) if begin == end}
        pieces = [(token, index not in added) for index, token in enumerate(self._token_ids)]
        own = token_bytes(tokenizer)
        self.text = tokenizer.decode([token for token, is_text in pieces if is_text])
        self._starts = text_starts(own.of(token) if is_text else b"" for token, is_text in pieces)

    def positions(self, logprobs: PromptLogprobs | None) -> list[dict[int, Any]]:
        """Return the log-probabilities by token, the prompt's own first.

        The first token of a prompt has none; nor has any where the engine returned none.
        """
        made: list[dict[int, Any]] = []
        known = logprobs or [None] * len(self._token_ids)
        for token, start, position in zip(self._token_ids, self._starts, known, strict=True):
            if position is None:
                (text,) = token_texts(self._tokenizer, [token])
                made.append({token: PlacedLogprob(None, None, text, start)})
            else:
                one = position[token]
                placed = PlacedLogprob(one.logprob, one.rank, one.decoded_token, start)
                made.append({token: placed} | {k: v for k, v in position.items() if k != token})
        return made


def _starts_of(spans: Sequence[tuple[int, int]]) -> list[int]:
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
        given = [request.prompt] if isinstance(request.prompt, str) else request.prompt
        most = params.truncate_prompt_tokens
        if most is not None and most < 0:
            most = params.max_input_tokens
        texts = [one if isinstance(one, str) else None for one in given]
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
