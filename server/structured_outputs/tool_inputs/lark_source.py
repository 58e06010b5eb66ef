"""Lark grammars of the JSON text of what a Lark grammar generates.

Escaping in JSON works character by character, so that translating each string and each expression
of a grammar translates its whole language. Rules and operators stay as they are.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from server.structured_outputs.constraint import UnusableError
from server.structured_outputs.rewriting.scalars.characters import escaped
from server.structured_outputs.tool_inputs.common_terminals import COMMON_TERMINALS
from server.structured_outputs.tool_inputs.json_text import class_regex, json_regex

_TOKEN = re.compile(
    r"""
    (?P<space>\s+ | //[^\n]* | \#[^\n]*)
    | (?P<range>"(?:[^"\\\n]|\\.)+"\s*\.\.\s*"(?:[^"\\\n]|\\.)+")
    | (?P<string>"(?:[^"\\\n]|\\.)*"i?)
    | (?P<regex>/(?!/)(?:[^/\\\n]|\\.)+/[a-z]*)
    | (?P<import>%import\s[^\n]*)
    | (?P<directive>%[a-z]+|@)
    | (?P<special><[^<>\n]*>)
    | (?P<repeat>~\s*\d+(?:\s*\.\.\s*\d+)?)
    | (?P<negation>~)
    | (?P<options>\[(?:lazy|capture|stop|suffix|max_tokens|temperature|stop_capture)\b)
    | (?P<name>[A-Za-z_][\w-]*)
    | (?P<sign>[^"'])
    """,
    re.VERBOSE,
)
_REFUSED = {
    "directive": "only '%import common' and '%ignore' are supported",
    "special": "special tokens cannot be a part of the text",
    "negation": "'~' before a part is not supported",
    "options": "options of rules are not supported",
}
_IMPORT = re.compile(
    r"%import\s+common\s*(?:\.\s*(\w+)\s*(?:->\s*(\w+))?|\(([\w\s,]+)\))\s*(?:(?://|\#).*)?"
)
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|(.))", re.DOTALL)
_LETTERS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "b": "\b", "v": "\v", "0": "\0"}
_FLAGS = "isu"


def json_lark(definition: str) -> str:
    """Return the grammar, line by line, of JSON text. Linear in the size of `definition`.

    Raises `UnusableError` for parts that have no translation; llguidance reports all other
    mistakes.
    """
    return "".join(_translated(definition))


def _translated(definition: str) -> Iterator[str]:
    at = 0
    while at < len(definition):
        found = _TOKEN.match(definition, at)
        if found is None:
            raise UnusableError(f"{_line(definition, at)}: a string has no end")
        kind, text = str(found.lastgroup), found[0]
        try:
            yield _token(kind, text)
        except UnusableError as error:
            raise UnusableError(f"{_line(definition, at)}: {error}") from None
        at = found.end()


def _token(kind: str, text: str) -> str:
    if kind == "space":
        return "\n" * text.count("\n") or " "
    if kind == "string":
        return _string(text)
    if kind == "range":
        return _range(text)
    if kind == "regex":
        return _regex(text)
    if kind == "import":
        return _import(text)
    if kind == "repeat":
        return f"{{{','.join(re.findall(r'[0-9]+', text))}}}"
    if kind in _REFUSED and text != "%ignore":
        raise UnusableError(f"{text!r}: {_REFUSED[kind]}")
    return text


def _string(source: str) -> str:
    text = _unescaped(source.removesuffix("i")[1:-1])
    if source.endswith("i"):
        return f"/(?i:{json_regex(escaped(text))})/"
    return json.dumps(json.dumps(text, ensure_ascii=False)[1:-1], ensure_ascii=False)


def _range(source: str) -> str:
    first, last = (_unescaped(part.strip()[1:-1]) for part in re.split(r'(?<=")\s*\.\.', source))
    if len(first) != 1 or len(last) != 1 or last < first:
        raise UnusableError(f"{source}: a range is between two characters")
    return f"/{json_regex(class_regex(first, last))}/"


def _regex(source: str) -> str:
    end = source.rindex("/")
    flags = source[end + 1 :]
    if flags.strip(_FLAGS):
        raise UnusableError(f"the flags {flags!r} of an expression: only i, s and u are supported")
    found = json_regex(source[1:end], dot_all="s" in flags)
    return f"/(?i:{found})/" if "i" in flags else f"/{found}/"


def _import(source: str) -> str:
    found = _IMPORT.fullmatch(source.rstrip())
    if found is None:
        raise UnusableError(f"{source.strip()!r}: only terminals of 'common' can be imported")
    names = [(found[1], found[2] or found[1])]
    if found[3] is not None:
        names = [(name, name) for name in re.split(r"[\s,]+", found[3].strip(" ,"))]
    return "\n".join(_common(name, alias) for name, alias in names)


def _common(name: str, alias: str) -> str:
    if name not in COMMON_TERMINALS:
        known = ", ".join(COMMON_TERMINALS)
        raise UnusableError(f"'common' has no terminal {name!r}; it has {known}")
    return f"{alias}: /{json_regex(COMMON_TERMINALS[name])}/"


def _unescaped(text: str) -> str:
    return _ESCAPE.sub(_character, text)


def _character(found: re.Match[str]) -> str:
    if found[4] is not None:
        return _LETTERS.get(found[4], found[4])
    point = int(found[1] or found[2] or found[3], 16)
    if point > 0x10FFFF or 0xD800 <= point < 0xE000:
        raise UnusableError(f"{found[0]!r} is no character")
    return chr(point)


def _line(definition: str, at: int) -> str:
    return f"line {definition.count(chr(10), 0, at) + 1}"
