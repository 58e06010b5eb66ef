"""Random bodies of every form: read or refused, soon, in little memory, and never a fault of ours.

Time is the processor's, so that a busy machine is no failure. `make test ARGS='-m wide'` tries many
more than every run does.
"""

from __future__ import annotations

import gc
import json
import resource
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from server.errors import InternalError, ServerError
from server.frontend import ParsedRequest
from server.vllm.models import request_models
from server.vllm.reading import BodyReader, is_small
from tests.edges.corpus import BODIES, endpoint_of
from tests.edges.test_reading import MODELS, RULES

pytestmark = pytest.mark.engine

MAX_CPU_S = 2.0
MAX_SMALL_CPU_S = 0.1
"""Of a body that is read on the event loop."""
MAX_GROWTH_BYTES = 512 << 20
MAX_BODY_BYTES = 4 << 20
FEW, MANY = 15, 1500

WORDS = (
    *("user", "assistant", "system", "tool", "text", "input_text", "function", "message", "auto"),
    *("required", "none", "json_schema", "json_object", "structural_tag", "image_url", "refusal"),
    *("function_call", "function_call_output", "reasoning", "tool_use", "tool_result", "ephemeral"),
)
NAMES = (
    *("role", "content", "type", "text", "name", "id", "tool_calls", "function", "arguments"),
    *("parameters", "schema", "json_schema", "strict", "call_id", "output", "input", "summary"),
    *("format", "properties", "items", "$ref", "enum", "anyOf", "pattern", "json", "regex"),
    *("choice", "grammar", "effort", "include_usage", "input_schema", "tool_use_id", "source"),
)
leaves = st.one_of(
    st.sampled_from(
        [None, True, False, 0, 1, -1, 2**31, 2**63, 10**30, 0.5, -1e308, "", "a" * 3000]
    ),
    st.sampled_from(WORDS),
    st.text(max_size=8),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
)
few = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.sampled_from(NAMES), inner, max_size=5),
    ),
    max_leaves=10,
)
many = st.builds(lambda value, number: [value] * number, few, st.sampled_from([2, 50, 3000]))
# Many of something, as the value of a field, in a list, or as a member of what lies in a list.
values = st.one_of(
    few,
    many,
    st.lists(st.one_of(few, many), max_size=3),
    st.lists(st.dictionaries(st.sampled_from(NAMES), st.one_of(few, many), max_size=4), max_size=2),
)


def bodies(form: str) -> st.SearchStrategy[dict[str, Any]]:
    """Valid bodies of a form, in which up to four fields hold anything."""
    names = sorted({*MODELS[form].model_fields, "unheard_of", "store", "functions"})
    wrong = st.dictionaries(st.sampled_from(names), values, min_size=1, max_size=4)
    return wrong.map(lambda fields: {"model": "m", **BODIES[form], **fields})


class Spent:
    """What the slowest body took."""

    def __init__(self) -> None:
        self.number = 0
        self.slowest_s = 0.0
        self.slowest = b""

    def note(self, seconds: float, raw: bytes) -> None:
        self.number += 1
        if seconds > self.slowest_s:
            self.slowest_s, self.slowest = seconds, raw


@pytest.fixture(scope="module")
def reader() -> Iterator[BodyReader]:
    # A full collection of what other tests left takes a second; it is no request's.
    gc.collect()
    gc.freeze()
    yield BodyReader(RULES, request_models())
    gc.unfreeze()


def attack(reader: BodyReader, form: str, number: int) -> Spent:
    """Read so many random bodies of a form."""
    endpoint, spent = endpoint_of(form), Spent()

    @settings(
        max_examples=number,
        derandomize=number == FEW,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    @given(body=bodies(form))
    def one(body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        if len(raw) > MAX_BODY_BYTES:
            return
        started = time.thread_time()
        try:
            assert isinstance(reader.read(endpoint, raw), ParsedRequest)
        except ServerError as error:
            assert not isinstance(error, InternalError)
            assert 400 <= error.status < 500
            assert len(error.body()) < 4096
        seconds = time.thread_time() - started
        spent.note(seconds, raw)
        assert seconds < (MAX_SMALL_CPU_S if is_small(raw) else MAX_CPU_S), raw[:200]

    # What is imported or built for the first request of a form is no request's.
    reader.read(endpoint, json.dumps({"model": "m", **BODIES[form]}).encode())
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    one()
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < MAX_GROWTH_BYTES
    return spent


@pytest.mark.parametrize("form", sorted(RULES.offered))
def test_random_bodies_are_read_or_refused(reader: BodyReader, form: str) -> None:
    attack(reader, form, FEW)


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("form", sorted(RULES.offered))
def test_many_random_bodies_are_read_or_refused(reader: BodyReader, form: str) -> None:
    spent = attack(reader, form, MANY)
    print(f"{form}: {spent.number} bodies, slowest {spent.slowest_s * 1000:.0f} ms")  # noqa: T201
