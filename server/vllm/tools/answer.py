"""An answer as its stream delivered it: reasoning, text and tool calls."""

from __future__ import annotations

from typing import Any


class ParsedAnswer:
    """Accumulates the deltas of one stream."""

    def __init__(self) -> None:
        self.reasoning = ""
        self.content = ""
        self._calls: dict[int, Any] = {}

    def add(self, delta: Any) -> None:
        """Add one delta of vLLM's parsers."""
        self.reasoning += delta.reasoning or ""
        self.content += delta.content or ""
        for piece in delta.tool_calls or ():
            self._add_call(piece)

    @property
    def calls(self) -> list[Any]:
        """Tool calls as vLLM's FunctionCall, in the order in which they began."""
        return list(self._calls.values())

    def parts(self) -> tuple[str | None, str | None, list[Any]]:
        """Return reasoning, text and tool calls as `Parser.parse` does."""
        return self.reasoning or None, self.content or None, self.calls

    def _add_call(self, piece: Any) -> None:
        from vllm.entrypoints.generate.base.protocol import FunctionCall

        call = self._calls.get(piece.index)
        if call is None:
            call = FunctionCall(id=piece.id, name=piece.function.name, arguments="")
            self._calls[piece.index] = call
        call.arguments += piece.function.arguments or ""
