"""End of an answer: its cause, and the finish reason that is sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json

_SURROGATE = re.compile(
    r"\\u[dD][89abAB][\da-fA-F]{2}\\u[dD][c-fC-F][\da-fA-F]{2}"
    r"|(?P<lone>\\u[dD][89a-fA-F][\da-fA-F]{2})|\\.",
    re.DOTALL,
)
"""Escapes of JSON; `lone` is one half of a pair, which is no character."""


@dataclass(frozen=True, slots=True)
class Ending:
    """Finish reason of the engine, and the stop string or token of the request that matched."""

    reason: str = "stop"
    matched: int | str | None = None

    @classmethod
    def of(cls, output: Any, request: Any) -> Ending:
        """Return the ending of a finished `CompletionOutput` for a request of vLLM."""
        matched = output.stop_reason
        # vLLM reports all but one of the model's own end tokens as stop tokens, too.
        stop_ids = getattr(request, "stop_token_ids", None) or ()
        if isinstance(matched, int) and matched not in stop_ids:
            matched = None
        return cls(output.finish_reason or "stop", matched)

    @property
    def is_cut(self) -> bool:
        """True if a limit, a stop string or a stop token, not the model, ended the answer."""
        return self.reason != "stop" or self.matched is not None


NATURAL = Ending()
"""The model ended its answer."""


def is_whole(arguments: str) -> bool:
    """Return whether generated arguments are complete JSON; empty ones are."""
    try:
        from_json(replace_halves(arguments) or "{}")
    except ValueError:
        return False
    return True


def finish_reason(ending: Ending, arguments: Sequence[str], *, named: bool) -> str:
    """Return the finish reason of a chat choice with the `arguments` of its tool calls.

    As OpenAI: `tool_calls` if every call is complete, `stop` if the request named the tool
    (`named`).
    """
    if ending.reason != "stop":
        return ending.reason
    complete = bool(arguments) and all(is_whole(text) for text in arguments)
    return "tool_calls" if complete and not named else "stop"


def replace_halves(text: str) -> str:
    """Return JSON in which each escape of half a surrogate pair is that of U+FFFD."""
    return _SURROGATE.sub(lambda found: r"\ufffd" if found["lone"] else found[0], text)
