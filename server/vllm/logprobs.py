"""Log-probabilities: texts and bytes of tokens, and their places in the answer.

`top_logprobs` are the most likely tokens of each position. An entry has the bytes of its own token,
which for a part of a character is no text. The token that ends an answer has no entry.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from tokenizers import Tokenizer
from vllm.logprobs import Logprob, PromptLogprobs
from vllm.outputs import CompletionOutput
from vllm.tokenizers import TokenizerLike
from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
from vllm.v1.engine.logprobs import LogprobsProcessor

from server.vllm.patches import use_decoder

_CHOICE = re.compile(r'"choices":\[\{"index":(\d+)')
_HAS_LOGPROBS = '"logprobs":{'
"""In a chunk's JSON. No string of it has these quotes without a backslash."""
_MOST_TEXTS = 1 << 16
_REPLACEMENT = "\ufffd"
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenBytes:
    """The bytes that single tokens add to a text; for parts of characters they are no text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Read from the tokenizer's decoder how its vocabulary spells bytes."""
        self._tokenizer = tokenizer
        # Behind a letter: a decoder may drop the space before the first word of a text.
        encoded: Any = tokenizer.encode("a", add_special_tokens=False)
        self._letter: list[int] = getattr(encoded, "ids", encoded)
        self._skipped = len(tokenizer.decode(self._letter))
        decoder = getattr(tokenizer, "decoder", None)
        spelling = b"" if decoder is None else bytes(decoder.__getstate__())
        self._by_character = _byte_characters() if b'"ByteLevel"' in spelling else {}
        self._by_piece = b'"ByteFallback"' in spelling

    def of(self, token: int, *, skip_special_tokens: bool = False) -> bytes:
        """Return the bytes of a token; empty for an id without one, or a special token to skip."""
        text = self._tokenizer.decode([*self._letter, token], skip_special_tokens)[self._skipped :]
        if _REPLACEMENT not in text or not (self._by_character or self._by_piece):
            return text.encode(errors="replace")
        piece = self._tokenizer.id_to_token(token) or ""
        if self._by_piece and (byte := _BYTE_PIECE.fullmatch(piece)):
            return bytes((int(byte[1], 16),))
        if all(character in self._by_character for character in piece):
            return bytes(self._by_character[character] for character in piece)
        return text.encode()


@lru_cache(maxsize=4)
def token_bytes(tokenizer: TokenizerLike) -> TokenBytes:
    backend: Any = getattr(tokenizer, "_tokenizer", tokenizer)
    return TokenBytes(backend)


def text_starts(pieces: Iterable[bytes]) -> list[int]:
    """Return how many characters of a text come before each of its pieces.

    A piece that continues a character begins where the character does.
    """
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    starts, length = [], 0
    for piece in pieces:
        starts.append(length)
        length += len(decoder.decode(piece))
    return starts


def _byte_characters() -> dict[str, int]:
    """Return the byte of each character of a byte-level vocabulary (GPT-2's table)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(0x100) if byte not in shown]
    table = {chr(byte): byte for byte in shown}
    return table | {chr(0x100 + number): byte for number, byte in enumerate(hidden)}


class TokenTexts:
    """vLLM's `convert_ids_list_to_tokens` with the texts of the tokens that it had before.

    Each text depends on its token alone. Decoding them costs more than all else that a token with
    log-probabilities does in the HTTP process. Bytes that are no text are written as in OpenAI's
    answers: `\\xe6\\x97`.
    """

    def __init__(self) -> None:
        # One object: threads make the log-probabilities of prompts.
        self._kept: tuple[TokenizerLike | None, dict[int, str]] = None, {}

    def __call__(self, tokenizer: TokenizerLike, token_ids: Sequence[int]) -> list[str]:
        """Return the text of each token; the list is the caller's."""
        owner, texts = self._kept
        if tokenizer is not owner or len(texts) > _MOST_TEXTS:
            texts = {}
            self._kept = tokenizer, texts
        new = [token for token in token_ids if token not in texts]
        if new:
            texts.update(zip(new, convert_ids_list_to_tokens(tokenizer, new), strict=True))
            for token in new:
                if _REPLACEMENT in texts[token]:
                    token_text = token_bytes(tokenizer).of(token)
                    texts[token] = token_text.decode(errors="backslashreplace")
        return [texts[token] for token in token_ids]


token_texts = TokenTexts()


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
        adapted = cls(**{field.name: getattr(processor, field.name) for field in fields(processor)})
        adapted.detokenizer, adapted.starts, adapted.placed = detokenizer, [], 0
        if adapted.tokenizer is not None:
            adapted._note_starts()
        return adapted

    def _note_starts(self) -> None:
        detokenizer = self.detokenizer
        decode = detokenizer.decode_next

        def decode_next(token: int) -> str:
            text = decode(token)
            start = len(detokenizer.output_text)
            own_text = token_bytes(self.tokenizer).of(token).decode(errors="replace")
            # What comes before its own text is left of a character that it does not continue.
            if own_text and text.endswith(own_text):
                start += len(text) - len(own_text)
            self.starts.append(start)
            return text

        use_decoder(detokenizer, decode_next)

    def update_from_output(self, output: EngineCoreOutput) -> None:
        """Add the logprobs of a step; the detokenizer has its tokens already."""
        super().update_from_output(output)
        if self.tokenizer is None or not self.logprobs:
            return
        end = len(self.logprobs)
        for index in range(self.placed, end):
            token, sampled = next(iter(self.logprobs[index].items()))
            is_last = index == end - 1 and output.finish_reason is FinishReason.STOP
            self.logprobs[index][token] = self._in_place(index, token, sampled, is_last)
        self.placed = end

    def _in_place(self, index: int, token: int, sampled: Logprob, is_last: bool) -> PlacedLogprob:
        same = sampled.logprob, sampled.rank, sampled.decoded_token
        if index >= len(self.starts):
            return PlacedLogprob(*same, len(self.detokenizer.output_text), None)
        skips = self.detokenizer.skip_special_tokens
        text_bytes = token_bytes(self.tokenizer).of(token, skip_special_tokens=skips)
        return PlacedLogprob(
            *same, self.starts[index], None if is_last and not text_bytes else text_bytes
        )

    def pop_prompt_logprobs(self) -> PromptLogprobs | None:
        """Return the prompt's logprobs, for every output of a stream.

        vLLM's processor returns them once. They are lost when that output is merged into a queued
        output of another choice.
        """
        return self.prompt_logprobs

    def _verify_tokens(self, decoded_tokens_list: list[str], *_: Any, **__: Any) -> list[str]:
        """Return the texts as they are: `TokenTexts` writes parts of characters as bytes."""
        return decoded_tokens_list


class UnsentLogprobs:
    """Log-probabilities of steps without a chunk, which the answer's next chunk has.

    vLLM sends none for a step whose text its parser holds back.
    """

    def __init__(self) -> None:
        self._positions: dict[int, list[Any]] = {}

    def add_to(self, result: Any) -> None:
        """Add the positions of earlier results that were not sent to one of vLLM's results."""
        for output in result.outputs:
            positions = [*self._positions.get(output.index, ()), *(output.logprobs or ())]
            self._positions[output.index] = output.logprobs = positions

    def note_frame(self, frame: str) -> None:
        if _HAS_LOGPROBS in frame and (index := _CHOICE.search(frame)) is not None:
            self._positions.pop(int(index[1]), None)

    async def noting_deltas(self, events: Any) -> AsyncGenerator[Any, None]:
        """Yield a response's events, and forget what deltas have sent."""
        follows = False
        async with aclosing(events):
            async for event in events:
                if event.type == "response.output_item.added":
                    follows = event.output_index > 0
                elif event.type.endswith(".delta"):
                    if follows and event.type == "response.output_text.delta":
                        # The end of the reasoning before it was held back, too.
                        entries = event.logprobs
                        size = len(event.delta.encode())
                        begin = len(entries)
                        while begin and size > 0:
                            begin -= 1
                            size -= len(entries[begin].bytes)
                        event.logprobs = entries[begin:]
                    follows = False
                    self._positions.clear()
                yield event


def shown_positions(positions: Any) -> list[tuple[int, Any]]:
    """Return the positions that have an entry, each with the token that was sampled."""
    sampled = ((next(iter(position)), position) for position in positions)
    return [(token, one) for token, one in sampled if one[token].text_bytes is not None]


def placed_entries(create: Any, positions: Any, *args: Any, **options: Any) -> Any:
    """Return what `create`, a method of vLLM's serving classes, makes of the shown positions.

    Its entries get the bytes of their tokens.
    """
    shown = shown_positions(positions)
    answer = create([token for token, _ in shown], [one for _, one in shown], *args, **options)
    for entry, (token, position) in zip(getattr(answer, "content", answer), shown, strict=True):
        entry.bytes = list(position[token].text_bytes)
    return answer


def add_bytes(entries: Any, tokens: Iterable[int], tokenizer: Any) -> None:
    """Set the bytes of alternatives, those of their tokens."""
    for entry, token in zip(entries, tokens, strict=False):
        entry.bytes = list(token_bytes(tokenizer).of(token))


def most_likely(logprobs: dict[int, Any], number: int | None) -> dict[int, Any]:
    """Return the `number` most likely tokens of a position, the likeliest first; -1: all.

    vLLM puts the sampled token in front of them, and counts it among them.
    """
    if number is None or number < 0:
        return logprobs
    ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)
    return dict(ranked[:number])


def place_beam(output: CompletionOutput, tokenizer: Any, *, skips: bool) -> None:
    """Place the tokens of a beam; its positions are shared with others and lack texts."""
    bytes_of = token_bytes(tokenizer)
    pieces = [bytes_of.of(token, skip_special_tokens=skips) for token in output.token_ids]
    starts = text_starts(pieces)
    positions: Any = output.logprobs or ()
    placed: list[Any] = []
    for index, (token, position) in enumerate(zip(output.token_ids, positions, strict=False)):
        texts = token_texts(tokenizer, list(position))
        known = {
            other: PlacedLogprob(one.logprob, one.rank, text)
            for (other, one), text in zip(position.items(), texts, strict=True)
        }
        chosen = known.pop(token)
        chosen.text_offset, chosen.text_bytes = starts[index], pieces[index]
        placed.append({token: chosen, **known})
    output.logprobs = placed
