"""The input of a custom tool's call, read from the arguments of its function."""

from __future__ import annotations

import json
import re

from server.structured_outputs.tool_inputs.custom_tools import INPUT

_HEAD = re.compile(rf'\s*\{{\s*"{INPUT}"\s*:\s*"')
_HEAD_PARTS = ("{", f'"{INPUT}"', ":", '"')
_LETTERS = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_TEXT = re.compile(r'[^"\\]+')
_ESCAPE = re.compile(r"\\(?:u[0-9a-fA-F]{4}|[^u])", re.DOTALL)
_HIGH = r"\\u[dD][89abAB][0-9a-fA-F]{2}"
_PAIR = re.compile(_HIGH + r"\\u[dD][c-fC-F][0-9a-fA-F]{2}")
_HALF_PAIR = re.compile(_HIGH + r"(?:\\(?:u[0-9a-fA-F]{0,3})?)?")
_HALVES = range(0xD800, 0xE000)


class InputReader:
    """Turns pieces of arguments, `{"input": "…"}`, into pieces of the input.

    Arguments of another form, which no grammar has guided, are the input as they are.
    """

    def __init__(self) -> None:
        self._held = ""
        self._state = "head"

    def read(self, piece: str) -> str:
        """Return the part of the input that is known after one more piece of the arguments."""
        self._held += piece
        if self._state == "head":
            self._begin()
        if self._state == "plain":
            text, self._held = self._held, ""
            return text
        return self._string() if self._state == "string" else ""

    def end(self) -> str:
        """Return the rest of the input, after the last piece."""
        text = self._held if self._state == "head" else ""
        self._held, self._state = "", "ended"
        return text

    def _begin(self) -> None:
        found = _HEAD.match(self._held)
        if found is not None:
            self._held, self._state = self._held[found.end() :], "string"
        elif not _may_become_head(self._held):
            self._state = "plain"

    def _string(self) -> str:
        parts: list[str] = []
        text, at = self._held, 0
        while at < len(text) and text[at] != '"':
            found = _TEXT.match(text, at) or _escape(text, at)
            if found is None:
                break
            parts.append(found[0] if text[at] != "\\" else _character(found[0]))
            at = found.end()
        self._held = text[at:]
        if self._held.startswith('"'):
            self._held, self._state = "", "ended"
        return "".join(parts)


def input_of(arguments: str) -> str:
    """Return the input in whole or cut arguments, as a stream of them delivers it."""
    reader = InputReader()
    return reader.read(arguments) + reader.end()


def _may_become_head(text: str) -> bool:
    """Return whether more text may complete the beginning of the arguments."""
    rest = text
    for part in _HEAD_PARTS:
        rest = rest.lstrip()
        if not rest.startswith(part):
            return part.startswith(rest)
        rest = rest[len(part) :]
    return True


def _escape(text: str, at: int) -> re.Match[str] | None:
    """Return the escape at a place of a text; None if more text may belong to it."""
    if (pair := _PAIR.match(text, at)) is not None:
        return pair
    if _HALF_PAIR.fullmatch(text, at):
        return None
    return _ESCAPE.match(text, at)


def _character(escape: str) -> str:
    """Return the character of an escape; the replacement character for half of a pair."""
    if escape[1] != "u":
        return _LETTERS.get(escape[1], escape[1])
    found: str = json.loads(f'"{escape}"')
    return "\ufffd" if ord(found[0]) in _HALVES else found
