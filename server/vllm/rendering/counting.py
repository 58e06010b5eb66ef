"""Tokenize whole prompts, so that the error of one that is too long has its length."""

from __future__ import annotations

from typing import Any


def count_whole_prompts() -> None:
    """Keep vLLM from cutting prompts behind the context's last token; idempotent.

    The tokenizer reads the whole text in either case; the length of texts is checked before.
    """
    from vllm.renderers.params import TokenizeParams

    upstream = TokenizeParams.get_encode_kwargs
    if upstream.__name__ == _encode_whole.__name__:
        return

    def encode(self: TokenizeParams) -> dict[str, Any]:
        return _encode_whole(self, upstream(self))

    encode.__name__ = _encode_whole.__name__
    TokenizeParams.get_encode_kwargs = encode  # type: ignore[method-assign]


def _encode_whole(params: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    if params.truncate_prompt_tokens is not None:
        return arguments
    kept = {name: value for name, value in arguments.items() if name != "max_length"}
    return {**kept, "truncation": False}
