"""The tool prompt of the served model, and the parser of its calls."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from server.errors import UnsupportedFieldError
from server.wire.endpoint import Endpoint, JsonObject

PromptSource = Literal["template", "default", "none"]
_CALLS = frozenset(("function_call", "function_call_output", "tool_use", "tool_result"))
"""Types of input items and content blocks with tool calls or their results."""


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Source of the prompt that describes tools to the model, and the parser of its calls.

    Without a `parser`, calls stay text. `reason` is the reason for the choice of `prompt`.
    """

    prompt: PromptSource
    parser: str | None
    reason: str

    def to_dict(self) -> JsonObject:
        """Return all fields as JSON values."""
        return asdict(self)

    def __str__(self) -> str:
        shown = {
            "template": "shown by the model's chat template",
            "default": "shown by the default tool prompt",
            "none": "refused",
        }
        parser = f"calls read by {self.parser}" if self.parser else "calls not read"
        return f"{shown[self.prompt]} ({self.reason}), {parser}"

    def check(self, endpoint: Endpoint, fields: JsonObject) -> None:
        """Raise `UnsupportedFieldError` for tools and calls that the prompt cannot contain."""
        if self.prompt != "none" or endpoint.pools:
            return
        path = "tools" if fields.get("tools") else _call_in(fields)
        if path is not None:
            raise UnsupportedFieldError(f"'{path}' is not supported: {self.reason}.", param=path)


NO_CALLS = ToolSupport("none", None, "the model generates no text")


def _call_in(fields: JsonObject) -> str | None:
    """Return the path of the first tool call or tool result in a conversation."""
    for name in ("messages", "input"):
        turns = fields.get(name)
        for index, turn in enumerate(turns if isinstance(turns, list) else ()):
            if not isinstance(turn, dict):
                continue
            path = f"{name}[{index}]"
            if turn.get("role") == "tool" or turn.get("type") in _CALLS:
                return path
            if turn.get("tool_calls"):
                return f"{path}.tool_calls"
            blocks = turn.get("content")
            for place, block in enumerate(blocks if isinstance(blocks, list) else ()):
                if isinstance(block, dict) and block.get("type") in _CALLS:
                    return f"{path}.content[{place}]"
    return None
