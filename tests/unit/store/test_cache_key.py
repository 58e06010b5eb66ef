"""A cache key depends on the names and values of its fields, and on nothing else."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rbln_backend.graphs.cache_key import CacheKey, JsonValue, canonical_json, diff

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_the_canonical_form_is_fixed() -> None:
    value: JsonValue = {"b": [1, 2.5, None], "a": {"y": True, "x": "\u00e9"}}
    assert canonical_json(value) == b'{"a":{"x":"\\u00e9","y":true},"b":[1,2.5,null]}'


def test_the_digest_is_golden() -> None:
    key = CacheKey({"phase": "decode", "bucket": 8, "dtype": "bfloat16"})
    assert key.digest == "2bd60aa764dd2ddb4b467e5280f170d4"


def test_order_and_kind_of_container_do_not_matter() -> None:
    first = CacheKey({"shape": (1, 2), "nested": {"a": 1, "b": 2}})
    second = CacheKey(
        MappingProxyType({"nested": MappingProxyType({"b": 2, "a": 1}), "shape": [1, 2]})
    )
    assert first == second
    assert hash(first) == hash(second)
    assert first.digest == second.digest


@pytest.mark.parametrize(
    "changed",
    [
        {"bucket": 9},
        {"bucket": "8"},
        {"bucket": 8.0},
        {"bucket": 8, "extra": None},
        {"Bucket": 8},
        {"bucket": [8]},
        {},
    ],
)
def test_any_change_of_a_name_or_value_is_another_key(changed: dict[str, Any]) -> None:
    assert CacheKey(changed) != CacheKey({"bucket": 8})


def test_a_key_is_not_its_digest() -> None:
    key = CacheKey({"a": 1})
    assert key != key.digest
    assert repr(key) == f"CacheKey({key.digest})"


def test_a_key_does_not_follow_later_changes_of_its_source() -> None:
    shape: list[JsonValue] = [1, 2]
    key = CacheKey({"shape": shape})
    digest = key.digest
    shape.append(3)
    assert key.fields["shape"] == [1, 2]
    assert key.digest == digest
    with pytest.raises(TypeError):
        key.fields["shape"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"a": {"b": {1, 2}}}, r"\$\.a\.b is a set, which JSON cannot hold"),
        ({"a": [0, object()]}, r"\$\.a\[1\] is a object"),
        ({"a": float("nan")}, r"\$\.a is nan"),
        ({"a": float("inf")}, r"\$\.a is inf"),
        ({"a": {1: 2}}, r"\$\.a has the key 1, must be a string"),
        ({"a": b"x"}, r"\$\.a is a bytes"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_its_path(value: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        CacheKey(value)


@given(st.dictionaries(st.text(), JSON, max_size=4))
def test_a_key_rebuilt_from_its_fields_is_the_same_key(fields: dict[str, Any]) -> None:
    key = CacheKey(fields)
    assert CacheKey(key.fields) == key
    assert canonical_json(key.fields) == canonical_json(fields)


def test_a_difference_names_paths_and_values() -> None:
    a = CacheKey({"torch": "2.13.0", "model": {"hidden": 64, "layers": 2}, "gone": 1})
    b = CacheKey({"torch": "2.14.0", "model": {"hidden": 64, "layers": 4}, "lora": [8, 2]})
    assert diff(a, b) == [
        "gone: removed, was 1",
        "lora: added, [8,2]",
        "model.layers: 2 -> 4",
        'torch: "2.13.0" -> "2.14.0"',
    ]


def test_equal_keys_do_not_differ() -> None:
    assert diff(CacheKey({"a": {"b": {}}}), CacheKey({"a": {"b": {}}})) == []


def test_an_emptied_object_differs() -> None:
    assert diff(CacheKey({"a": {"b": 1}}), CacheKey({"a": {}})) == [
        "a: added, {}",
        "a.b: removed, was 1",
    ]
