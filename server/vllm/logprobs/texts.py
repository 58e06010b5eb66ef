"""Texts of single tokens, each decoded once: those of log-probabilities repeat."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.tokenizers.detokenizer_utils import convert_ids_list_to_tokens
from vllm.v1.engine import logprobs

if TYPE_CHECKING:
    from vllm.tokenizers import TokenizerLike

_MOST_TEXTS = 1 << 16


class TokenTexts:
    """vLLM's `convert_ids_list_to_tokens` with the texts of the tokens that it had before.

    Each text depends on its token alone. Decoding them costs more than all else that a token with
    log-probabilities does in the HTTP process.
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
        return [texts[token] for token in token_ids]


def keep_token_texts() -> None:
    """Make vLLM's log-probabilities use kept texts; idempotent."""
    if not isinstance(logprobs.convert_ids_list_to_tokens, TokenTexts):  # type: ignore[attr-defined]
        logprobs.convert_ids_list_to_tokens = TokenTexts()  # type: ignore[attr-defined]
