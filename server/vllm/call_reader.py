"""Reads the tool calls of an answer from their JSON, as its text arrives.

What a call's arguments say never ends it: an object is read to its last brace. How the text was
cut into pieces does not matter.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

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

    def _close_value(self, end: int) -> None:
        self._state = "after"
        if not self._open:
            self.end = end
        elif len(self._open) == 1 and self._key is not None:
            begin, known = self.members[self._key]
            self.members[self._key] = begin, end if known is None else known


@dataclass(frozen=True)
class CallForm:
    """What is around the JSON objects of calls.

    `begin` and `after` are patterns: of what comes before a call, with the object's brace, and of
    what follows an object, with the brace of a next call or else the end of the calls. A group
    `name` of `begin` is the tool's name, and the object then is the arguments; a group `hidden` is
    a mark that is no text of the answer. `keyed`: the name is the object's only key. `tag`: name
    of the tags, where vLLM's grammar of calls has `tool_call`.
    """

    begin: Any
    after: Any
    keyed: bool = False
    tag: str | None = None


def _form(begin: str, after: str = "", **more: Any) -> CallForm:
    return CallForm(regex.compile(begin + r"\s*\{"), regex.compile(r"\s*" + after), **more)


def _listed(begin: str, end: str = "", **more: Any) -> CallForm:
    return _form(begin + r"\s*\[", rf"(?:,\s*\{{|\]\s*{end})", **more)


_HERMES = _form("<tool_call>", "</tool_call>")
FORMS = {
    "Hermes2ProToolParser": _HERMES,
    "Granite4ToolParser": _HERMES,
    "Ernie45ToolParser": CallForm(
        regex.compile(
            r"(?P<hidden>\n*</?response>|(?:\A|(?<=</?response>))\n+(?=[^\n]))"
            r"|\n*<tool_call>\s*\{"
        ),
        _HERMES.after,
    ),
    "LongcatFlashToolParser": _form(
        "<longcat_tool_call>", "</longcat_tool_call>", tag="longcat_tool_call"
    ),
    "Granite20bFCToolParser": _form("<function_call>"),
    "GraniteToolParser": _listed(r"\A\s*(?:<\|tool_call\|>)?\s*(?:<tool_call>)?"),
    "Phi4MiniJsonToolParser": _listed("functools"),
    "JambaToolParser": _listed("<tool_calls>", "</tool_calls>"),
    "HunyuanA13BToolParser": _listed("<tool_calls>", "</tool_calls>"),
    "xLAMToolParser": _listed(
        r"(?:\A|</think>|```(?:json)?|\[TOOL_CALLS\]|<tool_call>)", "(?:```|</tool_call>)?"
    ),
    "Llama3JsonToolParser": _form(r"(?:<\|python_tag\|>)?", r";\s*\{"),
    "Internlm2ToolParser": _form(r"<\|action_start\|>\s*<\|plugin\|>", r"<\|action_end\|>"),
    "GigaChat3ToolParser": _form(
        r"(?:<\|message_sep\|>\s*)?(?:function call<\|role_sep\|>\n|<\|function_call\|>)", "</s>"
    ),
    "ApertusToolParser": _listed(r"<\|tools_prefix\|>", r"<\|tools_suffix\|>", keyed=True),
    "DeepSeekV3ToolParser": _form(
        "(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>[^<\n]*<｜tool▁sep｜>(?P<name>[^\n]*)\n```json\n",
        "```<｜tool▁call▁end｜>",
    ),
    "DeepSeekV31ToolParser": _form(
        "(?:<｜tool▁calls▁begin｜>)?<｜tool▁call▁begin｜>(?P<name>[^<]*)<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
    ),
}
"""The forms of the classes in `vllm.tool_parsers`, by their names."""

LISTED, ARGUMENTS = _listed(r"\A"), _form(r"\A")
"""vLLM's schemas of calls that a request demands: a list of calls, and arguments of one tool."""

HELD_CHARACTERS = 1024
"""Arguments that nothing guides are sent when they are complete or longer than this.

Where shorter ones turn out to be no JSON, all is text; longer ones stay a call that is incomplete.
"""
_ARGUMENTS = ("arguments", "parameters")
_MEMBERS = {"name", *_ARGUMENTS}


@dataclass
class Found:
    """What was read since the last time: text, and the names and arguments of calls, by index.

    A call has its name with its first arguments.
    """

    text: str = ""
    names: dict[int, str] = field(default_factory=dict)
    arguments: dict[int, str] = field(default_factory=lambda: defaultdict(str))


class CallReader:
    """Reads one answer in a form of calls.

    `names` are the tools that may be called; `guided`: by a grammar, so that calls are sent as they
    arrive. `name`: the tool whose arguments the answer is. Objects that are no calls are text.
    Beside a call, text that comes after it, and calls of other tools, are left out.
    """

    def __init__(
        self, form: CallForm, names: Collection[str], *, guided: bool, name: str | None = None
    ) -> None:
        self._form, self._names, self._fixed_name = form, names, name
        self._held_length = 0 if guided else HELD_CHARACTERS
        self._text = ""
        self._at = 0  # what is before it was dealt with
        self._object: JsonObject | None = None
        self._begin = self._start = 0  # of the object, with and without what is before it
        self._name: str | None = None  # of the object, where it is not in the object
        self._is_behind = False  # an object, and what follows it is unknown
        self._sent: int | None = None  # up to where arguments of the object were sent
        self._calls = 0
        self._last: tuple[str, str] | None = None  # name and arguments of the last complete call
        self._uncalled: str | None = None  # text from a call on that no tool has
        self._shown_from = 0
        self._found = Found()

    def continue_from(self, text: str) -> None:
        """Read the text that the answer continues, before the answer.

        It is not returned, but for a call that is open at its end: that is the answer's first.
        """
        self.read(text)
        self._shown_from, self._calls, self._uncalled, self._sent = len(text), 0, None, None
        if self._is_behind and self._last is not None:
            self._announce(*self._last)

    @property
    def is_within_call(self) -> bool:
        return self._object is not None

    def read(self, text: str) -> Found:
        """Return what a further piece of the answer adds."""
        self._text += text
        return self._take(final=False, cut=False)

    def finish(self, *, cut: bool) -> Found:
        """Return the rest of the answer. `cut`: the model did not end it.

        A call that was cut is as long as it was generated; without arguments it is left out.
        """
        rest = self._take(final=True, cut=cut)
        if not self._calls:
            rest.text += self._uncalled or ""
        return rest

    def _take(self, *, final: bool, cut: bool) -> Found:
        goes_on = True
        while goes_on:
            if self._is_behind:
                goes_on = self._follow(final)
            elif self._object is None:
                goes_on = self._seek(final and not cut)
            else:
                goes_on = self._read_object(self._object, final, cut)
        read, self._found = self._found, Found()
        return read

    def _seek(self, final: bool) -> bool:
        """Show the text before the next call; return whether there is one."""
        match = self._form.begin.search(self._text, self._at, partial=not final)
        self._show(len(self._text) if match is None else match.start())
        if match is None or match.partial:
            return False
        groups = match.groupdict()
        if groups.get("hidden"):
            self._at = match.end()
        else:
            self._open(match.end() - 1, self._fixed_name or groups.get("name"))
        return True

    def _follow(self, final: bool) -> bool:
        """Go on behind an object; return whether it is known what follows it."""
        match = self._form.after.match(self._text, self._at, partial=not final)
        if match is not None and match.partial:
            return False
        self._is_behind = False
        if match is not None:
            opens = self._text.endswith("{", self._at, match.end())
            self._show(match.end() - opens)
            if opens:
                self._open(self._at, None)
        return True

    def _open(self, start: int, name: str | None) -> None:
        self._begin, self._start, self._name = self._at, start, name
        self._object, self._sent = JsonObject(start), None

    def _read_object(self, one: JsonObject, final: bool, cut: bool) -> bool:
        one.read(self._text)
        is_open = one.end is None and not one.is_faulty
        name, start, stop = self._get_call(one)
        if name in self._names and self._text.startswith("{", start, stop):
            if self._sent is None and (stop - start > self._held_length or (is_open and cut)):
                self._announce(name, "")
                self._sent = start
            if self._sent is not None:
                self._found.arguments[self._calls - 1] += self._text[self._sent : stop]
                self._sent = stop
        if is_open and not final:
            return False
        end = len(self._text) if is_open else one.end or one.at
        is_call = self._sent is not None
        if one.end is not None and name in self._names:
            arguments = _object_text(self._text[start:stop])
            if arguments is not None and not is_call:
                self._announce(name, arguments)
                is_call = True
            self._last = name, arguments or ""
        may_call = self._begin < self._start or one.members.keys() <= _MEMBERS
        if is_call or (is_open and cut and may_call):
            self._at = end
        else:
            if one.end is not None and name:
                self._uncalled = self._uncalled or ""
            self._show(end)
        self._object, self._is_behind = None, one.end is not None
        return True

    def _get_call(self, one: JsonObject) -> tuple[str, int, int]:
        """Return the name that an object has for its tool, and the span of its arguments.

        The name is empty while it is unknown. The span is as long as it was read, or empty.
        """
        if self._name is not None:
            return self._name, self._start, one.end or one.at
        if self._form.keyed:
            key, span = next(iter(one.members.items()), ("", None))
            name = key
        else:
            begin, end = one.members.get("name", (0, 0))
            is_name = end is not None and self._text.startswith('"', begin, end)
            name = json.loads(self._text[begin:end]) if is_name else ""
            span = next((one.members[key] for key in one.members if key in _ARGUMENTS), None)
        if span is None:
            return name, 0, 0
        start, stop = span
        return name, start, one.at if stop is None else stop

    def _announce(self, name: str, arguments: str) -> None:
        self._found.names[self._calls] = name
        self._found.arguments[self._calls] = arguments
        self._calls += 1
        self._uncalled = None

    def _show(self, end: int) -> None:
        """Return the text up to `end` as text, unless a call came before it."""
        text = self._text[max(self._at, self._shown_from) : end]
        self._at = end
        if self._uncalled is not None:
            self._uncalled += text
        elif not self._calls:
            self._found.text += text


def _object_text(value: str) -> str | None:
    """Return the object that the value of a call's arguments stands for; None if it is none."""
    if value in ("", "null"):
        return "{}"
    if value.startswith('"'):
        # Some models write the arguments as a text.
        value = json.loads(value).strip()
        one = JsonObject(0)
        one.read(value)
        if one.end != len(value):
            return None
    return value if value.startswith("{") else None
