"""An answer as its stream delivered it: reasoning, text and tool calls."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _ToolCall:
    id: str | None
    name: str
    arguments: str = ""


class ParsedAnswer:
    """Accumulates the deltas of one stream."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.content = ""
        self._calls: dict[int, _ToolCall] = {}

    def add(self, delta: Any) -> None:
        """Add one delta of vLLM's parsers."""
        self.reasoning += delta.reasoning or ""
        self.content += delta.content or ""
        for piece in delta.tool_calls or ():
            function = piece.function
            call = self._calls.setdefault(piece.index, _ToolCall(piece.id, function.name))
            call.arguments += function.arguments or ""

    @property
    def calls(self) -> list[_ToolCall]:
        """Tool calls in the order in which they began."""
        return list(self._calls.values())

    def parts(self) -> tuple[str | None, str | None, list[Any]]:
        """Return reasoning, text and tool calls as `Parser.parse` does."""
        from vllm.entrypoints.generate.base.protocol import FunctionCall

        calls = [
            FunctionCall(id=call.id, name=call.name, arguments=call.arguments)
            for call in self._calls.values()
        ]
        return self.reasoning or None, self.content or None, calls
