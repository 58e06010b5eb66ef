"""Texts are taken apart as a parser would, without building what is in them."""

import asyncio
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.storage.batch_table import InputLine, Line, LineRules, get_body, make_result, read_lines
from server.storage.jobs import LoopbackResponse
from server.storage.raw_json import (
    JsonSyntaxError,
    ShapeError,
    described,
    first_item,
    get_fields,
    get_string,
    in_one_line,
    joined,
)

CHAT = "/v1/chat/completions"
values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from("abcde"), values), st.booleans(), st.none() | st.just(2))
def test_fields_are_those_of_a_parser(fields: Any, escaped: bool, indent: int | None) -> None:
    text = json.dumps(fields, ensure_ascii=escaped, indent=indent).encode(errors="surrogatepass")
    try:
        text.decode()
    except UnicodeDecodeError:
        with pytest.raises(JsonSyntaxError):
            get_fields(text, "a")
        return
    try:
        found = get_fields(text, "a", "b")
    except JsonSyntaxError:
        # Half of a surrogate pair is no text.
        assert any("\\ud" in json.dumps(value) for value in (fields,))
        return
    assert set(found) == fields.keys() & {"a", "b"}
    for name, value in found.items():
        assert json.loads(value) == fields[name]
        assert json.loads(in_one_line(value)) == fields[name]
        assert b"\n" not in in_one_line(value)


@given(st.lists(st.lists(st.integers() | st.text(st.characters(codec="utf-8")))))
def test_arrays_are_joined(arrays: list[list[Any]]) -> None:
    texts = [json.dumps(array).encode() for array in arrays]
    assert json.loads(joined(texts)) == [item for array in arrays for item in array]
    for array, text in zip(arrays, texts, strict=True):
        first = first_item(text)
        assert (None if first is None else json.loads(first)) == (array[0] if array else None)


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b'{"a":}',
        b'{"a":1,}',
        b'{"a":NaN}',
        b'{"a":01}',
        b'{"a":"\n"}',
        b'{"b":"\xff"}',
        b'{"b":"\\x"}',
        b'{"a":1} 2',
        b'{"b":' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_what_is_no_json_is_refused(text: bytes) -> None:
    with pytest.raises(JsonSyntaxError):
        get_fields(text, "a")


def test_shapes_and_renderings() -> None:
    for text in (b"5", b"[]", b"null", b'"a"'):
        with pytest.raises(ShapeError):
            get_fields(text, "a")
    assert get_fields(b'{"a":1,"a":2}', "a") == {"a": b"2"}
    assert (get_string(b'"a\\u00e9"'), get_string(b"5"), get_string(None)) == ("aé", None, None)
    assert described(b"[" + b"1," * 500 + b"1]") == "an array of 1003 bytes"
    assert (described(b'{"a":1}'), described(None)) == ("{'a': 1}", "null")


HOSTILE = b"[" + b"[]," * 130_000 + b"[]]"
"""390 KB, of which a parser makes 130,000 objects: 8 MB."""
BODY = b'{"model":"m","messages":' + HOSTILE + b',"metadata":' + HOSTILE + b"}"


def line_of(body: bytes) -> bytes:
    return b'{"custom_id":"a","method":"POST","url":"' + CHAT.encode() + b'","body":' + body + b"}"


def input_line(folder: Path) -> Any:
    (folder / "in").write_bytes(line_of(BODY))
    return lambda: list(read_lines(folder / "in", LineRules(CHAT, 10, 1 << 24)))


def one_line(folder: Path) -> Any:
    return lambda: get_body(line_of(BODY))


def one_answer(folder: Path) -> Any:
    return lambda: make_result(Line("batch_a", 1, "c", 0, 9), LoopbackResponse(200, "", BODY))


@pytest.mark.parametrize("make", [input_line, one_line, one_answer])
def test_client_sized_values_are_not_built(
    tmp_path: Path, make: Callable[[Path], Callable[[], Any]]
) -> None:
    work = make(tmp_path)
    work()
    tracemalloc.start()
    try:
        work()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6 * len(BODY)


async def test_wrong_lines_say_what_is_wrong(tmp_path: Path) -> None:
    big = b'"' + b"x" * 5000 + b'"'
    wrong = {
        b'{"custom_id":' + big + b"}": ("invalid_custom_id", "a string of 5002 bytes"),
        b'{"custom_id":7}': ("invalid_custom_id", "got 7"),
        b"{}": ("invalid_custom_id", "got null"),
        b'{"custom_id":"a","method":"GET"}': ("invalid_method", "'GET'"),
        b'{"custom_id":"a","method":"POST","url":"/x"}': ("mismatched_url", "'/x'"),
        b'{"custom_id":"a","porpoise":1}': ("unknown_field", "'porpoise'"),
        line_of(b"[]"): ("invalid_body", "'body' must be an object"),
        line_of(b'{"model":5}'): ("invalid_model", "got 5"),
        b"[]": ("invalid_json_line", "got `array`"),
        b"{": ("invalid_json_line", "truncated"),
        b'{"body":"\xff"}': ("invalid_json_line", "utf-8"),
    }
    path = tmp_path / "in"
    path.write_bytes(b"\n".join(wrong) + b"\n")
    found = await asyncio.to_thread(lambda: list(read_lines(path, LineRules(CHAT, 99, 1 << 20))))
    for error, (code, words) in zip(found, wrong.values(), strict=True):
        assert not isinstance(error, InputLine)
        assert error["code"] == code
        assert words in error["message"]


def test_lines_that_begin_alike_are_known_by_their_first_message(tmp_path: Path) -> None:
    system = {"role": "system", "content": "You are a river."}
    bodies: list[dict[str, Any]] = [
        {"messages": [system, {"role": "user", "content": "a"}]},
        {"messages": [{"role": "system", "content": "You are a lake."}]},
        {"messages": [system, {"role": "user", "content": "b"}]},
        {"messages": [system], "model": "other"},
        {"messages": [system]},
    ]
    path = tmp_path / "in"
    path.write_bytes(b"\n".join(line_of(json.dumps(body).encode()) for body in bodies))
    lines = read_lines(path, LineRules(CHAT, len(bodies), 1 << 20))
    first, lake, second, other, third = (
        line.shared for line in lines if isinstance(line, InputLine)
    )
    assert first == second == third
    # New prefixes come last, so that they are added to the end of the index.
    assert first < lake < other


def test_a_byte_order_mark_before_the_first_line_is_ignored(tmp_path: Path) -> None:
    line = json.dumps({"custom_id": "a", "method": "POST", "url": CHAT, "body": {"x": 1}}).encode()
    path = tmp_path / "in"
    path.write_bytes(b"\xef\xbb\xbf" + line + b"\n" + line)
    first, second = read_lines(path, LineRules(CHAT, 9, 1 << 20))
    for found in (first, second):
        assert isinstance(found, InputLine)
        raw = path.read_bytes()[found.place : found.place + found.bytes]
        assert get_body(raw) == b'{"x": 1}'
