"""Formats and numbers: the grammar takes what the RFCs and the bounds allow, and nothing else."""

from __future__ import annotations

import json
import random
import re
from decimal import Decimal
from typing import Any

import pytest

from server.structured_outputs.rewriting.rewriting import rewrite
from server.structured_outputs.rewriting.scalars.formats import FORMATS
from tests.server.structured_outputs.walks import accepts, documents, faults

LABEL = "a" * 63
# By format: texts that it has and texts that it has not. From the RFCs and the JSON Schema suite.
EXAMPLES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "date": (
        ("2024-02-29", "2000-02-29", "1999-12-31"),
        ("2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31", "24-01-01", "2024-1-1"),
    ),
    "time": (
        ("08:30:06.283185Z", "23:59:59+00:00", "00:00:00-23:59"),
        ("24:00:00Z", "08:30:06", "08:60:00Z", "08:30:60Z", "12:00:00+24:00", "12:00:00 Z"),
    ),
    "date-time": (
        ("1963-06-19T08:30:06.283185Z", "1937-01-01T12:00:27.87+00:20"),
        ("1998-12-31T24:00:00Z", "2013-350T01:01:01", "1963-06-19 08:30:06Z",
         "1990-02-31T15:59:59Z"),
    ),
    "duration": (
        ("P4DT12H30M5S", "P4Y", "PT0S", "P1M", "PT36H", "P4W"),
        ("P", "PT", "P1YT", "4DT", "P1D2H", "P2S", "PT1D", "P1Y2W", "P2D1Y", "P1", "P1H"),
    ),
    "email": (
        ("joe.bloggs@example.com", "te~st@example.com", "a.b.c.d@e.f.g.h.i.j", "x" * 64 + "@a.bc"),
        ("2962", ".test@example.com", "test.@example.com", "te..st@example.com", "a@-b.com",
         "a b@c.de",
         "x" * 65 + "@a.bc", f"a@{LABEL}.{LABEL}.{LABEL}.{LABEL}", "a@b@c.de"),
    ),
    "hostname": (
        ("www.example.com", "h0stn4me", "1host", LABEL, "a.b.c.d.e.f", "a-b", "a--b", "ab-c"),
        ("-a", "a-", "a_b", "a..b", ".a", "a.", "", LABEL + "a", ".".join([LABEL] * 4), "xn--X",
         "xn--a",
         "XN--aa---o47jg78q", "ab--c", "ex_ample.com", "a b"),
    ),
    "ipv4": (
        ("192.168.0.1", "0.0.0.0", "255.255.255.255"),
        ("256.0.0.1", "127.0.0", "1.2.3.4.5", "01.2.3.4", "1.2.3.4/24", "0x7f000001", "1.2.3.4\n"),
    ),
    "ipv6": (
        ("::1", "::", "2001:db8::1", "1:2:3:4:5:6:7:8", "1:2:3:4:5:6:7::", "::2:3:4:5:6:7:8",
         "d6::", "a::b"),
        ("12345::", "1::2::3", "1:2:3:4:5:6:7", "1:2:3:4:5:6:7:8:9", ":2:3:4:5:6:7:8", "1:",
         "::g", "fe80::a%e",
         "1:2:3:4:5:6:7:8::"),
    ),
    "uuid": (
        ("2EB8AA08-aa98-11EA-b4aa-73b441d16380",),
        ("2eb8aa08-aa98-11ea-b4aa-73b441d1638", "2eb8aa08aa9811eab4aa73b441d16380", "{}",
         "2eb8-aa08-aa98-11ea-b4aa73b441d16380", "2eb8aa08-aa98-11ea-b4ga-73b441d16380"),
    ),
    "uri": (
        ("http://foo.bar/?baz=qux#quux", "https://a.b:65535/c", "urn:isbn:0-486-27557-4",
         "tel:+1-816-555-1212",
         "mailto:John.Doe@example.com", "file:///etc/hosts", "http://[2001:db8::1]:80/",
         "ftp://u:p@h/x",
         "http://xn--nw2a.xn--j6w193g/", "data:text/plain,a%20b", "http://a//b"),
        ("//foo.bar/", "/abc", "abc", "\\\\WINDOWS", "http:// x", ":// x", "bar,baz",
         "http://a:65536/", "1http://a",
         "http://a/%zz", "http://a/<b>", 'http://a/"', "http://[::g]/", "http://a/{x}",
         "http://a/b#c#d"),
    ),
    "uri-reference": (
        ("abc", "", "/abc", "a/b:c", "?q", "#fragment", "//foo.bar/x", "../x", "http://foo.bar/"),
        ("\\\\WINDOWS", "#frag\\ment", "a b", "//a:b", "//a:65536", "1a:b", "%zz", "a%2",
         "//a:b@c:d/", '"'),
    ),
    "iri": (
        ("https://example.com/한글?q=ü#ß", "http://한글.kr/", "urn:x"),
        ("/abc", "bar,baz", "http://2001:0db8:85a3::7334", "\\\\WINDOWS", "http://a/<",
         "http://a/ b"),
    ),
    "iri-reference": (("한글/x", "//한글.kr", "#ü", ""), ("\\\\ü", "#frä\\gment", "//a:b", "a b")),
    "idn-email": (("한글@한글.kr", "a@b.cd"), ("2962", "@b.cd", "a@", "a@한 글.kr", "a@b..cd")),
    "idn-hostname": (
        ("한글.example", "a.b", "日本"),
        ("xn--X", "-hello", "hello-", "〮실례.테스트", "", ".", "。", "a..b", "実--x", "א׳ב", "l·l",
         "한" * 11),
    ),
    "uri-template": (
        ("http://a.b/{x}/{y*}{?q,r:3}", "{+path}/here", "", "a%20b"),
        ("{", "}", "{x", "{x y}", "http://a/{term:1}/{term", "{}", "{x:0}", "a b", "{{x}}", "<"),
    ),
    "json-pointer": (
        ("", "/", "/foo/0", "/a~1b", "/m~0n", '/k"l', "/i\\j", "/ ", "//"),
        ("a", "/foo/bar~", "/~2", "#/a", "0", "/~"),
    ),
    "relative-json-pointer": (
        ("0", "1/foo", "0#", "10/a~1b", "2/0/baz"),
        ("", "/a", "-1/a", "01/a", "0##", "+1/a", "1/~2", "#"),
    ),
}  # fmt: skip


def test_every_format_has_examples() -> None:
    assert EXAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_format_has_its_texts_and_no_others(name: str) -> None:
    grammar = rewrite({"type": "string", "format": name}, compact=False).grammar
    good, bad = EXAMPLES[name]
    assert [text for text in good if not accepts(grammar, plain(text))] == []
    assert [text for text in bad if accepts(grammar, plain(text))] == []


def plain(text: str) -> str:
    """Return JSON in which only what has to be is escaped."""
    return json.dumps(text, ensure_ascii=False)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("more", [{}, {"maxLength": 12, "minLength": 2}], ids=["", "lengths"])
def test_every_text_of_a_format_is_of_it(name: str, more: dict[str, int]) -> None:
    schema = {"type": "string", "format": name, **more}
    try:
        grammar = rewrite(schema, compact=False).grammar
    except ValueError as error:
        assert more and "no value" in str(error)
        return
    texts = documents(grammar, 8, must_end=False)
    assert texts
    assert [(text, found) for text in texts if (found := faults(schema, text))] == []


def bounds(seed: int, count: int) -> list[dict[str, Any]]:
    """Make schemas of numbers with bounds of few and many digits."""
    pick = random.Random(seed)
    special = (0, 1, -1, 9, 10, 100, 999, 0.5, 0.1, 0.95, 1e-7, 1e-9, 10**14, -(10**12), 99.99)

    def number() -> float:
        kind = pick.randrange(4)
        if kind == 0:
            return pick.randint(-1000, 1000)
        if kind == 1:
            return round(pick.uniform(-10, 10), pick.randint(1, 4))
        return pick.choice(special) if kind == 2 else round(pick.uniform(-1000, 1000), 9)

    found = []
    for _ in range(count):
        low, high = sorted((number(), number()))
        schema: dict[str, Any] = {"type": pick.choice(("number", "number", "integer"))}
        if pick.random() < 0.8:
            schema[pick.choice(("minimum", "exclusiveMinimum"))] = low
        if pick.random() < 0.8:
            schema[pick.choice(("maximum", "exclusiveMaximum"))] = high
        if pick.random() < 0.3:
            schema["multipleOf"] = pick.choice((1, 2, 3, 0.5, 0.1, 0.01, 0.25, 1.5, 10))
        if pick.random() < 0.3:
            schema["not"] = {"enum": [number(), round(low), low]}
        found.append(schema)
    return found


def ends(schema: dict[str, Any]) -> list[float]:
    """Return the numbers that a schema of numbers names."""
    found = [v for key, v in schema.items() if key not in ("type", "not", "multipleOf")]
    return [*found, *schema.get("not", {}).get("enum", ())]


def near(schema: dict[str, Any], seed: int) -> set[str]:
    """Return texts of numbers at and beside the bounds of a schema."""
    pick = random.Random(seed)
    steps = ("0", "1", "0.5", "0.1", "0.000000001", "10")
    found = {
        Decimal(str(end)) + sign * Decimal(s)
        for end in ends(schema)
        for s in steps
        for sign in (1, -1)
    }
    found |= {Decimal(pick.randint(-2000, 2000)) / 10 for _ in range(4)}
    texts = {format(value, "f") for value in found}
    return texts | {f"{text}0" if "." in text else f"{text}.0" for text in texts}


@pytest.mark.parametrize("index", range(12))
def test_a_range_has_its_numbers_and_no_others(index: int) -> None:
    for schema in bounds(seed=index, count=12):
        try:
            found = rewrite(schema, compact=False)
        except ValueError as error:
            assert "no value" in str(error)
            continue
        texts = near(schema, index)
        taken = {text for text in texts if accepts(found.grammar, text)}
        taken |= set(documents(found.grammar, 2, must_end=False))
        assert [text for text in taken if faults(schema, text)] == [], schema
        if "multipleOf" in schema or max(map(abs, ends(schema)), default=0) > 10**6:
            continue
        # An integer is written without a point, and a number with few digits.
        form = r"-?\d+" if schema["type"] == "integer" else r"-?\d+(\.\d{1,3})?"
        short = [text for text in texts - taken if re.fullmatch(form, text) and text != "-0"]
        assert [text for text in short if not faults(schema, text)] == [], schema
