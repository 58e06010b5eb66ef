"""Reads the tool calls of an answer from their JSON, as its text arrives.

What a call's arguments say never ends it: an object is read to its last brace. How the text was
cut into pieces does not matter.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field

from server.vllm.tools.call_forms import CallForm
from server.vllm.tools.json_object import JsonObject

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
        """True if the text so far ends in a call."""
        return self._object is not None

    def read(self, text: str) -> Found:
        """Return what a further piece of the answer adds."""
        self._text += text
        return self._take(final=False, cut=False)

    def finish(self, *, cut: bool) -> Found:
        """Return the rest of the answer. `cut`: the model did not end it.

        A call that was cut is as long as it was generated; without arguments it is left out.
        """
        found = self._take(final=True, cut=cut)
        if not self._calls:
            found.text += self._uncalled or ""
        return found

    def _take(self, *, final: bool, cut: bool) -> Found:
        goes_on = True
        while goes_on:
            if self._is_behind:
                goes_on = self._follow(final)
            elif self._object is None:
                goes_on = self._seek(final and not cut)
            else:
                goes_on = self._read_object(self._object, final, cut)
        found, self._found = self._found, Found()
        return found

    def _seek(self, final: bool) -> bool:
        """Show the text before the next call; return whether there is one."""
        found = self._form.begin.search(self._text, self._at, partial=not final)
        self._show(len(self._text) if found is None else found.start())
        if found is None or found.partial:
            return False
        groups = found.groupdict()
        if groups.get("hidden"):
            self._at = found.end()
        else:
            self._open(found.end() - 1, self._fixed_name or groups.get("name"))
        return True

    def _follow(self, final: bool) -> bool:
        """Go on behind an object; return whether it is known what follows it."""
        found = self._form.after.match(self._text, self._at, partial=not final)
        if found is not None and found.partial:
            return False
        self._is_behind = False
        if found is not None:
            opens = self._text.endswith("{", self._at, found.end())
            self._show(found.end() - opens)
            if opens:
                self._open(self._at, None)
        return True

    def _open(self, start: int, name: str | None) -> None:
        self._begin, self._start, self._name = self._at, start, name
        self._object, self._sent = JsonObject(start), None

    def _read_object(self, one: JsonObject, final: bool, cut: bool) -> bool:
        """Read on in an object; return whether all of it was read."""
        one.read(self._text)
        is_open = one.end is None and not one.is_faulty
        name, start, stop = self._call_of(one)
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

    def _call_of(self, one: JsonObject) -> tuple[str, int, int]:
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
        """Begin the next call."""
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
