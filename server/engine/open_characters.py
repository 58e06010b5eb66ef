"""Texts of answers whose prompt ends in the middle of a character, or in U+FFFD.

vLLM primes the decode stream of the `tokenizers` library with the prompt. The library finds no
prefix in token ids whose text ends in U+FFFD, and returns the text of the whole prompt with the
first token. Such a prompt is replaced here by one letter and the tokens of the open character: the
answer begins with its own text, or with the character that it completes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from tokenizers.decoders import DecodeStream

from server.vllm.logprobs import TokenBytes
from server.vllm.patches import use_decode_stream

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from vllm.v1.engine.detokenizer import FastIncrementalDetokenizer
    from vllm.v1.engine.output_processor import RequestState

_REPLACEMENT = "\ufffd"
_MOST_OPEN_BYTES = 3
"""A character of UTF-8 has at most four bytes."""


class _StreamBehindOpenCharacter:
    """A decode stream that begins with the tokens of a character that the prompt left open."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        tokens: Sequence[int],
        chars: int,
        skip: bool,
        token_bytes: TokenBytes,
    ) -> None:
        """Read `tokens`, which have `chars` whole characters before the open one."""
        # One letter: a decoder may drop the space before the first word of a text.
        letter = tokenizer.encode("a", add_special_tokens=False).ids
        self._stream = DecodeStream(ids=letter, skip_special_tokens=skip)
        self._unjoined: DecodeStream | None = DecodeStream(ids=letter, skip_special_tokens=skip)
        self._bytes_of = partial(token_bytes.of, skip_special_tokens=skip)
        self._drop = chars
        for token in tokens:
            self._stream.step(tokenizer, token)

    def step(self, tokenizer: Tokenizer, token: int) -> str | None:
        """Return the text of a token, None while it is incomplete."""
        if self._unjoined is not None and (own := self._bytes_of(token)):
            if not 0x80 <= own[0] < 0xC0:
                # It does not continue the open character, which is then no part of the answer.
                self._stream, self._drop = self._unjoined, 0
            self._unjoined = None
        text = self._stream.step(tokenizer, token)
        if text and self._drop:
            text, self._drop = text[self._drop :], 0
        return text


def keep_prompt_out(state: RequestState, token_bytes: TokenBytes) -> None:
    """Replace the decode stream of a new request if its prompt's text ends in U+FFFD."""
    detokenizer: FastIncrementalDetokenizer = cast("FastIncrementalDetokenizer", state.detokenizer)
    prompt, tokenizer = state.prompt_token_ids, getattr(detokenizer, "tokenizer", None)
    if not prompt or not hasattr(detokenizer, "stream") or tokenizer is None:
        return
    skip = detokenizer.skip_special_tokens
    tail = list(_last_shown(tokenizer, prompt, skip))[::-1]
    if not tokenizer.decode(tail, skip_special_tokens=skip).endswith(_REPLACEMENT):
        return
    tokens, chars = _open_tokens([token_bytes.of(token) for token in tail])
    open_tokens = tail[len(tail) - tokens :]
    stream = _StreamBehindOpenCharacter(tokenizer, open_tokens, chars, skip, token_bytes)
    use_decode_stream(detokenizer, stream)


def _last_shown(tokenizer: Tokenizer, prompt: Sequence[int], skip: bool) -> Iterator[int]:
    """Yield the last tokens that have a text, the latest first: one more than may be open."""
    count = 0
    for token in reversed(prompt):
        if count > _MOST_OPEN_BYTES:
            return
        if tokenizer.decode([token], skip_special_tokens=skip):
            count += 1
            yield token


def _open_tokens(pieces: Sequence[bytes]) -> tuple[int, int]:
    """Return the number of last tokens that hold an open character, and of whole ones in them."""
    size = _open_bytes(b"".join(pieces)[-_MOST_OPEN_BYTES:])
    count, held = 0, b""
    while len(held) < size:
        count += 1
        held = pieces[-count] + held
    return count, len(held[: len(held) - size].decode(errors="replace"))


def _open_bytes(end: bytes) -> int:
    """Return the number of bytes at the end of a text that begin a character of UTF-8."""
    for size in range(1, len(end) + 1):
        try:
            end[-size:].decode()
        except UnicodeDecodeError as error:
            if error.reason == "unexpected end of data" and error.start == 0:
                return size
    return 0
