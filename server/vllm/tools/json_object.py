"""Follows a JSON object as its text arrives."""

from __future__ import annotations

import json

import regex

_SPACE = " \t\n\r"
_PLAIN = regex.compile(r'[^"\\\x00-\x1f]*')
_SCALAR = regex.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|true|false|null")
_ESCAPED = '"\\/bfnrt'
_HEX = "0123456789abcdefABCDEF"


class JsonObject:
    """The object that begins at a position of a text, as far as it was read.

    Positions are indices of the text. `at`: what is before it can begin an object. `end`: behind
    the last brace, None before it was read. `is_faulty`: what is at `at` cannot follow.
    `members`: begin and end of the values of the outermost members, by name; the end is None while
    it is unknown, and the first of several members with a name counts.
    """

    def __init__(self, start: int) -> None:
        self.at = start
        self.end: int | None = None
        self.is_faulty = False
        self.members: dict[str, tuple[int, int | None]] = {}
        self._open = ""  # the brackets that will close
        self._state = "value"
        self._start = start  # of the string or scalar that is being read
        self._hex = 0
        self._is_key = False
        self._key: str | None = None

    def read(self, text: str) -> None:
        """Read on in a text that begins with what was read before."""
        while self.at < len(text) and self.end is None and not self.is_faulty:
            if self._state == "string":
                self.at = _PLAIN.match(text, self.at).end()
                if self.at == len(text):
                    return
            char = text[self.at]
            if self._state == "scalar" and (char in ",]}" or char in _SPACE):
                # The scalar's last character was the one before.
                self.is_faulty = _SCALAR.fullmatch(text, self._start, self.at) is None
                if not self.is_faulty:
                    self._close_value(self.at)
                continue
            if self._state in ("string", "escape", "hex"):
                fits = self._go_on_in_string(char, text)
            else:
                fits = char in _SPACE or self._go_on(char, text)
            self.at += fits
            self.is_faulty = not fits

    def _go_on_in_string(self, char: str, text: str) -> bool:
        """Return whether a character can follow in a string, and go on to the next state."""
        if self._state == "escape":
            self._state, self._hex = ("hex", 4) if char == "u" else ("string", 0)
            return char == "u" or char in _ESCAPED
        if self._state == "hex":
            self._hex -= 1
            self._state = "hex" if self._hex else "string"
            return char in _HEX
        if char == '"':
            self._close_string(text)
            return True
        self._state = "escape"
        return char == "\\"

    def _go_on(self, char: str, text: str) -> bool:
        """Return whether a character can follow outside of strings, and go on to the next state."""
        state, closing = self._state, self._open[-1:]
        if state == "scalar":
            return self._is_scalar(text)
        if state in ("after", "first") and char == closing:
            self._open = self._open[:-1]
            self._close_value(self.at + 1)
            return True
        if state in ("colon", "after"):
            self._state = "value" if state == "colon" or closing == "]" else "key"
            return char == (":" if state == "colon" else ",")
        if state == "key" or (state == "first" and closing == "}"):
            self._begin_string(is_key=True)
            return char == '"'
        return self._begin_value(char, text)

    def _is_scalar(self, text: str) -> bool:
        """Return whether a scalar can have the character at `at`."""
        return _SCALAR.fullmatch(text, self._start, self.at + 1, partial=True) is not None

    def _begin_string(self, *, is_key: bool) -> None:
        self._state, self._start, self._is_key = "string", self.at, is_key

    def _close_string(self, text: str) -> None:
        if not self._is_key:
            self._close_value(self.at + 1)
            return
        self._state = "colon"
        if len(self._open) == 1:
            self._key = json.loads(text[self._start : self.at + 1])

    def _begin_value(self, char: str, text: str) -> bool:
        """Return whether a value can begin with a character."""
        if len(self._open) == 1 and self._key is not None:
            self.members.setdefault(self._key, (self.at, None))
        if char == '"':
            self._begin_string(is_key=False)
        elif char in "{[":
            self._open += "}" if char == "{" else "]"
            self._state = "first"
        else:
            self._state, self._start = "scalar", self.at
            return self._is_scalar(text)
        return True

    def _close_value(self, end: int) -> None:
        self._state = "after"
        if not self._open:
            self.end = end
        elif len(self._open) == 1 and self._key is not None:
            begin, known = self.members[self._key]
            self.members[self._key] = begin, end if known is None else known
