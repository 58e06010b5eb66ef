"""Token ids of a model for which its tokenizer has no token."""

from __future__ import annotations

from typing import Any

from vllm.config import ModelConfig
from vllm.tokenizers import cached_tokenizer_from_config


def missing_token_ids(tokenizer: Any, vocab_size: int) -> list[int]:
    """Return the ids below ``vocab_size`` without a token, ascending.

    Embeddings are padded, and some tokenizers have gaps. Empty without a tokenizer.
    """
    if tokenizer is None:
        return []
    known = set(tokenizer.get_vocab().values())
    missing = [token for token in range(vocab_size) if token not in known]
    fast: Any = getattr(tokenizer, "_tokenizer", None)
    if hasattr(fast, "id_to_token"):
        return [token for token in missing if fast.id_to_token(token) is None]
    # In other tokenizers several ids may have one name, such as bytes that are no text.
    last = max(*known, len(tokenizer) - 1)
    return [token for token in missing if token > last]


def missing_in(config: ModelConfig) -> list[int]:
    """Return the ids of a model without a token, by its own tokenizer; see above."""
    return missing_token_ids(cached_tokenizer_from_config(config), config.get_vocab_size())
