"""A whole answer in the pieces that a stream would have delivered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

MAX_PIECES = 512
"""Most pieces of one answer; longer answers have more tokens in a piece.

Some of vLLM's parsers read all earlier text again for each piece.
"""


def pieces_of(
    tokenizer: Any,
    text: str,
    token_ids: Sequence[int],
    prompt_ids: Sequence[int],
    *,
    skip_special_tokens: bool,
) -> list[tuple[str, list[int]]]:
    """Return the text and the tokens of each piece; the texts together are `text`.

    `text` may end before its last tokens do, at a stop string.
    """
    step = -(-len(token_ids) // MAX_PIECES) or 1
    lengths = _lengths(tokenizer, token_ids, prompt_ids, skip_special_tokens)
    pieces: list[tuple[str, list[int]]] = []
    start = end = 0
    for at in range(0, len(token_ids), step):
        chunk = list(token_ids[at : at + step])
        end += sum(next(lengths) for _ in chunk)
        last = at + step >= len(token_ids)
        pieces.append((text[start : None if last else end], chunk))
        start = end
    return pieces or [(text, [])]


def _lengths(
    tokenizer: Any, token_ids: Sequence[int], prompt_ids: Sequence[int], skip_special_tokens: bool
) -> Iterator[int]:
    """Yield the number of characters that each token adds to the text."""
    from vllm.tokenizers.detokenizer_utils import (
        convert_prompt_ids_to_tokens,
        detokenize_incrementally,
    )

    tokens, prefix, read = convert_prompt_ids_to_tokens(
        tokenizer, list(prompt_ids), skip_special_tokens
    )
    for token in token_ids:
        new, text, prefix, read = detokenize_incrementally(
            tokenizer, [token], tokens, prefix, read, skip_special_tokens
        )
        tokens = [*tokens[prefix:], *new]
        prefix, read = 0, read - prefix
        yield len(text)
