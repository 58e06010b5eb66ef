"""`undeclared_properties` of requests: its values, its default, and what it applies to."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import InvalidValueError
from server.structured_outputs.constraint import Undeclared, job_key
from server.structured_outputs.request_constraints import constraints_of
from server.structured_outputs.undeclared_option import take_undeclared
from server.wire.endpoint import Endpoint

SCHEMA = {"type": "object", "properties": {"a": {}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA, "strict": True}}


@pytest.mark.parametrize(
    ("body", "default", "found"),
    [
        ({}, Undeclared.OMIT, Undeclared.OMIT),
        ({}, Undeclared.ALLOW, Undeclared.ALLOW),
        ({"undeclared_properties": None}, Undeclared.ALLOW, Undeclared.ALLOW),
        ({"undeclared_properties": "allow"}, Undeclared.OMIT, Undeclared.ALLOW),
        ({"undeclared_properties": "omit"}, Undeclared.ALLOW, Undeclared.OMIT),
    ],
)
def test_a_request_overrides_the_default(
    body: dict[str, Any], default: Undeclared, found: Undeclared
) -> None:
    assert take_undeclared(body, default) is found
    assert body == {}


@pytest.mark.parametrize("value", ["Allow", True, 1, [], {}])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(InvalidValueError, match="must be 'omit' or 'allow'") as raised:
        take_undeclared({"undeclared_properties": value}, Undeclared.OMIT)
    assert raised.value.param == "undeclared_properties"


def test_it_applies_to_formats_and_tools() -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    body = {"response_format": schema, "tools": [TOOL]}
    open_ = constraints_of(Endpoint.CHAT, body, undeclared=Undeclared.ALLOW)
    assert [item.undeclared for job in open_ for item in job] == [Undeclared.ALLOW] * 2
    closed = constraints_of(Endpoint.CHAT, body)
    assert [job_key(job) for job in open_] != [job_key(job) for job in closed]
