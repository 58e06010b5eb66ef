"""Mixins of vLLM's serving classes: `top_logprobs` are the most likely tokens of each position."""

from __future__ import annotations

from typing import Any


class LikelyInChats:
    """For chats."""

    def _get_top_logprobs(
        self, logprobs: Any, top_logprobs: int | None, *args: Any, **options: Any
    ) -> Any:
        if not options.get("return_all"):
            logprobs = _most_likely(logprobs, top_logprobs)
        return super()._get_top_logprobs(  # type: ignore[misc]
            logprobs, top_logprobs, *args, **options
        )


class LikelyInResponses:
    """For the Responses API."""

    def _topk_logprobs(self, logprobs: Any, top_logprobs: int, tokenizer: Any) -> Any:
        likely = _most_likely(logprobs, top_logprobs)
        return super()._topk_logprobs(  # type: ignore[misc]
            likely, top_logprobs=top_logprobs, tokenizer=tokenizer
        )


def _most_likely(logprobs: dict[int, Any], number: int | None) -> dict[int, Any]:
    """Return the `number` most likely tokens of a position, the likeliest first; -1: all.

    vLLM puts the sampled token in front of them, and counts it among them.
    """
    if number is None or number < 0:
        return logprobs
    ranked = sorted(logprobs.items(), key=lambda item: item[1].rank)
    return dict(ranked[:number])
