"""End of an answer: its cause, and the finish reason that is sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic_core import from_json


@dataclass(frozen=True, slots=True)
class Ending:
    """Finish reason of the engine, and the stop string or token that matched."""

    reason: str = "stop"
    matched: int | str | None = None

    @classmethod
    def of(cls, output: Any) -> Ending:
        """Return the ending of a finished `CompletionOutput` of vLLM."""
        return cls(output.finish_reason or "stop", output.stop_reason)

    @property
    def is_cut(self) -> bool:
        """True if a limit or a stop string, not the model, ended the answer."""
        return self.reason != "stop" or isinstance(self.matched, str)


NATURAL = Ending()
"""The model ended its answer."""


def is_whole(arguments: str) -> bool:
    """Return whether generated arguments are complete JSON; empty ones are."""
    try:
        from_json(arguments or "{}")
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
