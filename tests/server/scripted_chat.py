"""A front end whose chats stream what a script has for the last message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field

from starlette.requests import Request

from server.errors import InternalError
from server.frontend import ParsedRequest
from server.wire import Endpoint, JsonObject
from tests.server.scripted import ScriptedFrontend

Script = Sequence[JsonObject | float | str]
"""Deltas of a chat's answer, seconds to pause, and "break" for an error."""


@dataclass
class ChatFrontend(ScriptedFrontend):
    """Streams scripts by the text of the last message; keeps the bodies that it got."""

    scripts: Mapping[str, Script] = field(default_factory=dict)
    bodies: list[JsonObject] = field(default_factory=list)

    async def handle(
        self, endpoint: Endpoint, parsed: ParsedRequest, extra_fields: JsonObject, request: Request
    ) -> bytes | AsyncGenerator[str, None]:
        if endpoint is not Endpoint.CHAT:
            return await super().handle(endpoint, parsed, extra_fields, request)
        self.bodies.append(parsed.fields)
        return self._chat(self.scripts[parsed.fields["messages"][-1]["content"]])

    async def _chat(self, script: Script) -> AsyncGenerator[str, None]:
        tokens, reason = 0, "stop"
        for piece in script:
            if isinstance(piece, float):
                await asyncio.sleep(piece)
                continue
            if isinstance(piece, str):
                raise InternalError("broken")
            tokens += 1
            reason = "tool_calls" if "tool_calls" in piece else reason
            yield _frame({"choices": [{"index": 0, "delta": piece, "finish_reason": None}]})
        yield _frame({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        yield _frame({"choices": [], "usage": {"completion_tokens": tokens}})
        yield "data: [DONE]\n\n"


def _frame(event: JsonObject) -> str:
    return f"data: {json.dumps(event)}\n\n"
