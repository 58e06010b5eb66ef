"""Texts and bytes of single tokens."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import logprobs

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from vllm.tokenizers import TokenizerLike

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
    """Return the reader of a tokenizer's bytes."""
    own: Any = getattr(tokenizer, "_tokenizer", tokenizer)
    return TokenBytes(own)


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
                    own = token_bytes(tokenizer).of(token)
                    texts[token] = own.decode(errors="backslashreplace")
        return [texts[token] for token in token_ids]


token_texts = TokenTexts()


def keep_token_texts() -> None:
    """Make vLLM's log-probabilities use kept texts; idempotent."""
    logprobs.convert_ids_list_to_tokens = token_texts  # type: ignore[attr-defined]
