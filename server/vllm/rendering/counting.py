"""How vLLM tokenizes: whole prompts where none is cut, and cut ones with their special tokens.

The error of a prompt that is too long has its length.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def keep_special_tokens(tokenizer: Any) -> None:
    """Make the tokenizer of a pooling model cut texts on the side that a request names.

    vLLM tokenizes such a text whole and takes the first or last tokens of all, without a separator
    or the query of a pair. The ordinary tokens are cut here, of a pair those of the second text
    first, as transformers does for `only_second` on its own side.
    """
    from transformers import TokenizersBackend
    from vllm.renderers.params import TokenizeParams

    if not isinstance(tokenizer, TokenizersBackend):
        return

    class SideTokenizer(type(tokenizer)):  # type: ignore[misc]
        """Mixin for the tokenizer's class, as vLLM's own pool of tokenizers."""

        def __call__(self, *args: Any, truncation_side: str | None = None, **arguments: Any) -> Any:
            """Return the encoding of one text or pair, cut to ``max_length`` on its side."""
            if truncation_side is None:
                return super().__call__(*args, **arguments)
            most = arguments.pop("max_length")
            whole = super().__call__(*args, **{**arguments, "truncation": False})
            kept = kept_tokens(whole.sequence_ids(0), most, truncation_side)
            return {name: [values[index] for index in kept] for name, values in whole.items()}

    tokenizer.__class__ = SideTokenizer
    upstream = TokenizeParams.get_encode_kwargs

    def encode(self: TokenizeParams) -> dict[str, Any]:
        arguments, most, side = upstream(self), self.truncate_prompt_tokens, self.truncation_side
        if most is None or side is None:
            return arguments
        most = self.max_input_tokens if most < 0 else most
        return {**arguments, "truncation": True, "max_length": most, "truncation_side": side}

    TokenizeParams.get_encode_kwargs = encode  # type: ignore[method-assign]


def kept_tokens(sequences: Sequence[int | None], most: int, side: str) -> list[int]:
    """Return the places of the tokens that stay.

    `sequences` has the text of each token, 0 or 1, None for special tokens.
    """
    excess = len(sequences) - most
    cut: set[int] = set()
    for text in (1, 0):
        places = [index for index, one in enumerate(sequences) if one == text]
        count = min(max(excess - len(cut), 0), len(places))
        cut.update(places[:count] if side == "left" else places[len(places) - count :])
    return [index for index in range(len(sequences)) if index not in cut]


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
