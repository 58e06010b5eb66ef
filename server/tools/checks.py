"""Checks of a body's tools and calls. The request models refuse values of a wrong JSON type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from server.errors import InvalidValueError, describe
from server.tools.choice import get_field
from server.wire.endpoint import Endpoint, JsonObject

MAX_NAME_CHARACTERS = 256
_UNCALLABLE = frozenset('"\\<>')
"""They end a name in the forms of calls, or begin their marks."""
_CONTINUING = "continue_final_message"


def check_tools(endpoint: Endpoint, body: JsonObject) -> None:
    """Raise `InvalidValueError` for a tool that no call can name, or calls to be continued."""
    if endpoint.pools:
        return
    for name, path in _names(body.get("tools"), "tools"):
        fits = 0 < len(name) <= MAX_NAME_CHARACTERS and name.isprintable()
        if not fits or not name.strip() or _UNCALLABLE & set(name):
            raise InvalidValueError(
                f"'{path}' must have 1 to {MAX_NAME_CHARACTERS} printable characters and no "
                f"quotation mark, \\, < or >, got {describe(name)}.",
                param=path,
            )
    messages = body.get("messages")
    last = messages[-1] if isinstance(messages, list) and messages else None
    if body.get(_CONTINUING) is True and get_field(last, "tool_calls"):
        path = f"messages[{len(messages or ()) - 1}].tool_calls"
        raise InvalidValueError(
            f"'{path}' cannot be continued: '{_CONTINUING}' continues the text of a message; send "
            "its calls as text, or leave them out.",
            param=path,
        )


def _names(tools: Any, path: str) -> Iterator[tuple[str, str]]:
    """Yield the names of tools, and of the tools of a namespace, with their paths."""
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        place = f"{path}[{index}]"
        for holder, at in (
            (tool, place),
            *((get_field(tool, kind), f"{place}.{kind}") for kind in ("function", "custom")),
        ):
            name = get_field(holder, "name")
            if isinstance(name, str):
                yield name, f"{at}.name"
        yield from _names(get_field(tool, "tools"), f"{place}.tools")
