"""Log-probabilities of a request: tokens with their place in the text, prompts for every stream."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from vllm.logprobs import Logprob, PromptLogprobs
from vllm.v1.engine import FinishReason
from vllm.v1.engine.logprobs import LogprobsProcessor

from server.vllm.logprobs.texts import token_bytes

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer


@dataclass
class PlacedLogprob(Logprob):
    """The log-probability of a token of an answer or an echoed prompt, whose first token has none.

    ``text_bytes`` are the bytes that it adds to the text, none for a special token that the text
    omits; None for the token that ends the answer, if the text lacks it. ``text_offset`` counts
    characters of the text before it.
    """

    logprob: float | None  # type: ignore[assignment]
    text_offset: int = 0
    text_bytes: bytes | None = b""


class AnswerLogprobs(LogprobsProcessor):
    """vLLM's logprobs processor of a request, which places the tokens in the text."""

    detokenizer: FastIncrementalDetokenizer
    starts: list[int]
    """Lengths of the text before each token that was decoded."""
    placed: int

    @classmethod
    def of(cls, processor: LogprobsProcessor, detokenizer: Any) -> AnswerLogprobs:
        """Return a replacement of vLLM's processor, before its first logprobs."""
        made = cls(**{field.name: getattr(processor, field.name) for field in fields(processor)})
        made.detokenizer, made.starts, made.placed = detokenizer, [], 0
        if made.tokenizer is not None:
            made._note_starts()
        return made

    def _note_starts(self) -> None:
        # With its type, by which `make upstream` finds what is replaced below.
        detokenizer: FastIncrementalDetokenizer = self.detokenizer
        decode = detokenizer.decode_next

        def decode_next(token: int) -> str:
            text = decode(token)
            start = len(detokenizer.output_text)
            own = token_bytes(self.tokenizer).of(token).decode(errors="replace")
            # What comes before its own text is left of a character that it does not continue.
            if own and text.endswith(own):
                start += len(text) - len(own)
            self.starts.append(start)
            return text

        detokenizer.decode_next = decode_next  # type: ignore[method-assign, assignment]

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Add the logprobs of a step; the detokenizer has its tokens already."""
        super().update_from_output(output)
        if self.tokenizer is None or not self.logprobs:
            return
        end = len(self.logprobs)
        for index in range(self.placed, end):
            token, sampled = next(iter(self.logprobs[index].items()))
            is_last = index == end - 1 and output.finish_reason is FinishReason.STOP
            self.logprobs[index][token] = self._in_place(index, token, sampled, is_last=is_last)
        self.placed = end

    def _in_place(
        self, index: int, token: int, sampled: Logprob, *, is_last: bool
    ) -> PlacedLogprob:
        same = sampled.logprob, sampled.rank, sampled.decoded_token
        if index >= len(self.starts):
            return PlacedLogprob(*same, len(self.detokenizer.output_text), None)
        skips = self.detokenizer.skip_special_tokens
        own = token_bytes(self.tokenizer).of(token, skip_special_tokens=skips)
        return PlacedLogprob(*same, self.starts[index], None if is_last and not own else own)

    def pop_prompt_logprobs(self) -> PromptLogprobs | None:
        """Return the prompt's logprobs, for every output of a stream.

        vLLM's processor returns them once. They are lost when that output is merged into a queued
        output of another choice.
        """
        return self.prompt_logprobs

    def _verify_tokens(self, decoded_tokens_list: list[str], *_: Any, **__: Any) -> list[str]:
        """Return the texts as they are: `TokenTexts` writes parts of characters as bytes."""
        return decoded_tokens_list
