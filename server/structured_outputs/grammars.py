"""Grammars in llguidance's dialect of Lark: of schemas, structural tags, regexes and choices.

llguidance matches a special token of the tokenizer only if the grammar names it. A marker such as
`<tool_call>` is therefore written both as its token and as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.normaliser import normalised
from server.structured_outputs.patterns import PatternError, whole_text

Format = dict[str, Any]

MARK = "%llguidance"
"""Beginning of a grammar for llguidance."""
_HEAD = f"{MARK} {{}}\nstart: "
_FREE_HEAD = f'{MARK} {{"no_forcing": true}}\nstart: '
"""For texts that may have any spelling, not only the tokenizer's."""
_CALL_NUMBER = r"\d+"
"""The only pattern in vLLM's tags for tools."""
_LIMITS = ("max_tokens", "max_chars", "max_whitespace_cnt", "any_order")
_SPACED = json.JSONEncoder(ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class SchemaRules:
    """How schemas are followed.

    `compact`: JSON has no white space. `closed`: objects that list properties have no others.
    """

    compact: bool
    closed: bool


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar for llguidance; `left_out` has a line for each part that it does not follow."""

    text: str
    left_out: tuple[str, ...]


class UnsupportedTagError(ValueError):
    """A format of a structural tag has no grammar here."""


def schema_grammar(schema: Any, rules: SchemaRules) -> Grammar:
    """Return the grammar of a schema. Raises `UnusableError` as `normalised` does."""
    found = normalised(schema, closed=rules.closed)
    return Grammar(f"{_HEAD}{_json_rule(found.schema, rules)}\n", found.left_out)


def choice_grammar(choices: list[str]) -> Grammar:
    """Return the grammar of one of these texts."""
    # A terminal: a rule has a limit of options.
    return Grammar(f"{_FREE_HEAD}TEXT\nTEXT: {' | '.join(map(_quoted, choices))}\n", ())


def regex_grammar(regex: str) -> Grammar:
    """Return the grammar of the texts that a regex describes. Raises `UnusableError`."""
    try:
        text = whole_text(regex)
    except PatternError as error:
        raise UnusableError(str(error)) from None
    # A slash would end it, and what looks like a schema's pattern be tried as one.
    text = re.sub(r'\\.|(?=["/])', lambda found: found[0] or "\\", text)
    return Grammar(f"{_FREE_HEAD}/{text or '(?:)'}/\n", ())


def tag_grammar(tag: Any, specials: Mapping[str, int], rules: SchemaRules) -> Grammar | None:
    """Return the grammar of a structural tag; None if one of its formats has none.

    `specials` are the ids of the tokenizer's special tokens by text, without those that end an
    answer. Raises `UnusableError` as `normalised` does.
    """
    writer = _TagWriter(specials, rules)
    try:
        start = writer.last(_format(tag))
    except (UnsupportedTagError, KeyError, TypeError, AttributeError):
        # The backend reports the reason for a malformed tag.
        return None
    return Grammar("\n".join([f"{_HEAD}{start}", *writer.lines, ""]), tuple(writer.left_out))


def _json_rule(schema: Any, rules: SchemaRules) -> str:
    """Return a normalised schema as a rule.

    White space is a blank after a comma or a colon: without a bound, a model could fill its context
    with it, and llguidance repeats what may stand elsewhere.
    """
    blank = "" if rules.compact else " ?"
    options = {
        "whitespace_flexible": False,
        "item_separator": f",{blank}",
        "key_separator": f":{blank}",
    }
    whole = {} if schema is True else schema
    return f"%json {json.dumps({**whole, 'x-guidance': options})}"


class _TagWriter:
    """Writes the rules of one structural tag; each method returns the options of a format."""

    def __init__(self, specials: Mapping[str, int], rules: SchemaRules) -> None:
        self.specials = specials
        self.lines: list[str] = []
        self.left_out: list[str] = []
        self._rules = rules
        self._schemas: dict[str, str] = {}

    def add(self, stem: str, *options: str) -> str:
        """Add a rule of these options and return its name."""
        name = f"{stem}_{len(self.lines)}"
        self.lines.append(f"{name}: " + "\n  | ".join(option or '""' for option in options))
        return name

    def last(self, item: Format) -> str:
        """Return the rule of a format that nothing follows: free text may end it."""
        if item["type"] == "sequence":
            *parts, end = item["elements"]
            return " ".join([*map(self.write, parts), self.last(end)])
        return self.write(item, _LAST.get(item["type"]))

    def write(self, item: Format, options: Options | None = None) -> str:
        """Return the rule of a format; `options` replaces the function of its type."""
        options = options or _FORMATS.get(item["type"])
        if options is None or any(item.get(name) not in (None, False) for name in _LIMITS):
            raise UnsupportedTagError
        return self.add("tag", *options(self, item))

    def schema(self, item: Format) -> list[str]:
        if item.get("style", "json") != "json" or item.get("excludes"):
            raise UnsupportedTagError
        text = json.dumps(item["json_schema"])
        if text not in self._schemas:
            found = normalised(item["json_schema"], closed=self._rules.closed)
            self._schemas[text] = self.add("json", _json_rule(found.schema, self._rules))
            self.left_out += found.left_out
        return [self._schemas[text]]

    def constant(self, item: Format) -> list[str]:
        return [self._literal(item["value"])]

    def number(self, item: Format) -> list[str]:
        if item["pattern"] != _CALL_NUMBER:
            raise UnsupportedTagError
        return ["/[0-9]+/"]

    def sequence(self, item: Format) -> list[str]:
        return [" ".join(self.write(part) for part in item["elements"])]

    def either(self, item: Format) -> list[str]:
        return [self.write(part) for part in item["elements"]]

    def any_text(self, item: Format) -> list[str]:
        return [_Text(self, _texts(item.get("excludes", []))).free]

    def tag(self, item: Format, begin: str | None = None) -> list[str]:
        """Return one option for each end; `begin` replaces the tag's."""
        begin = self._literal(item["begin"] if begin is None else begin)
        content, ends = item["content"], _ends(item)
        if content["type"] != "any_text":
            rule = self.write(content)
            return [f"{begin} {rule} {self._literal(end)}" for end in ends]
        text = _Text(self, _texts(content.get("excludes", [])), ends)
        return [f"{begin} {text.until(end)}" for end in ends]

    def tags(self, item: Format) -> list[str]:
        one = self._any_of(self.tag(tag) for tag in item["tags"])
        more = (
            "" if item.get("stop_after_first") else f" ({self._literal(item['separator'])} {one})*"
        )
        return [one + more] if item.get("at_least_one") else [one + more, ""]

    def triggered(self, item: Format) -> list[str]:
        """Return the options of text with tags that triggers begin; a required one comes first."""
        ends = [end for tag in item["tags"] for end in _ends(tag)]
        triggers = _texts(item["triggers"])
        text = _Text(self, _texts(item.get("excludes", [])), triggers, ends)
        calls = []
        for trigger in triggers:
            begun = [tag for tag in item["tags"] if tag["begin"].startswith(trigger)]
            rest = self._any_of(self.tag(tag, tag["begin"].removeprefix(trigger)) for tag in begun)
            calls.append(f"{text.until(trigger)} {rest}")
        once = item.get("stop_after_first")
        call = self.add("call", *calls)
        if not item.get("at_least_one"):
            return [text.free, call] if once else [f"{call}* {text.free}"]
        first = self._any_of(self.tag(tag) for tag in item["tags"])
        return [first if once else f"{first} {call}* {text.free}"]

    def _any_of(self, options: Iterable[list[str]]) -> str:
        found = [option for some in options for option in some]
        if not found:
            raise UnsupportedTagError
        return self.add("tag", *found)

    def _literal(self, text: str) -> str:
        """Return a text, each special token of which may be a token or text."""
        found = [(text.index(name), -len(name), name) for name in self.specials if name in text]
        if not found:
            return _quoted(text)
        start, _, name = min(found)
        head, tail = text[:start], text[start + len(name) :]
        return f"{_quoted(head)} ({self.token(name)} | {_quoted(name)}) {self._literal(tail)}"

    def token(self, name: str) -> str:
        """Return a special token."""
        return f"<[{self.specials[name]}]>"


class _Text:
    """Rules of free text: without `excludes`, and up to one of the `stops` if there are any."""

    def __init__(
        self,
        writer: _TagWriter,
        excludes: list[str],
        stops: Collection[str] = (),
        before: Collection[str] = (),
    ) -> None:
        """`before` are texts that may precede the free text."""
        markers = [*excludes, *stops]
        if "" in markers or any(_overlap(a, b) for a in (*markers, *before) for b in markers):
            # The lexer could not decide where a marker begins.
            raise UnsupportedTagError
        self._writer = writer
        pattern = "/(?s:.+)/"
        if markers:
            pattern += f" & ~/(?s:.*)(?:{'|'.join(map(_escaped, markers))})(?s:.*)/"
        add = writer.add
        self._text = add("TEXT", pattern)
        tokens = [
            str(token)
            for name, token in writer.specials.items()
            if not any(_overlap(name, m) or _overlap(m, name) or name in m for m in markers)
        ]
        # No text follows text directly: the two could form a marker.
        pieces = f"({self._text}? <[{','.join(tokens)}]>)*" if tokens else '""'
        self._pieces = add("pieces", pieces)
        self.free = add("text", f"{self._pieces} {self._text}?")

    def until(self, stop: str) -> str:
        """Return the rule of the text up to its first `stop`, which it includes."""
        options = [self._writer.add("UNTIL", f"{self._text}? {_quoted(stop)}")]
        if stop in self._writer.specials:
            options.append(f"{self._text}? {self._writer.token(stop)}")
        return f"{self._pieces} {self._writer.add('until', *options)}"


def _format(tag: Any) -> Format:
    """Return the format of a tag; the older form has text with tags."""
    if "structures" not in tag:
        found: Format = tag["format"]
        return found
    tags = [
        {**item, "content": {"type": "json_schema", "json_schema": item["schema"]}}
        for item in tag["structures"]
    ]
    return {"type": "triggered_tags", "triggers": tag["triggers"], "tags": tags}


def _quoted(text: str) -> str:
    """Return a literal of the grammar."""
    return _SPACED.encode(text)


def _escaped(text: str) -> str:
    """Return a regular expression of this text, in which nothing ends the expression."""
    return re.sub(r"[^0-9A-Za-z]", lambda found: f"\\x{{{ord(found[0]):x}}}", text)


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise UnsupportedTagError
    return value


def _ends(tag: Format) -> list[str]:
    return _texts(tag["end"] if isinstance(tag["end"], list) else [tag["end"]])


def _overlap(one: str, other: str) -> bool:
    """Return True if an end of `one` begins `other`; a text overlaps itself by a part of it."""
    longest = min(len(one), len(other)) - (one == other)
    return any(one.endswith(other[:size]) for size in range(1, longest + 1))


Options = Callable[[_TagWriter, Format], list[str]]
_FORMATS: dict[str, Options] = {
    "json_schema": _TagWriter.schema,
    "const_string": _TagWriter.constant,
    "regex": _TagWriter.number,
    "sequence": _TagWriter.sequence,
    "or": _TagWriter.either,
    "tag": _TagWriter.tag,
    "tags_with_separator": _TagWriter.tags,
}
_LAST: dict[str, Options] = {
    "any_text": _TagWriter.any_text,
    "triggered_tags": _TagWriter.triggered,
}
