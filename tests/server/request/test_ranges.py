"""Numbers of sampling parameters outside of their ranges, compared with vLLM's own check."""

from __future__ import annotations

import math
from typing import Any

import pytest

from server.errors import InvalidValueError
from server.request.values import check_values
from server.wire.endpoint import Endpoint
from tests.server.request.limits import LIMITS

CASES = [
    *(("presence_penalty", value) for value in (-2.1, -2, 0, 2, 2.1)),
    *(("frequency_penalty", value) for value in (-3, -2.0, 2.0, 3)),
    *(("repetition_penalty", value) for value in (-1, 0, 1e-9, 1, 50, math.inf)),
    *(("min_p", value) for value in (-0.1, 0, 0.5, 1, 1.1)),
    *(("min_tokens", value) for value in (-1, 0, 5)),
    *(("top_k", value) for value in (-2, -1, 0, 1, 7)),
    *(("stream_interval", value) for value in (-1, 0, 1, 2**63 - 1)),
]


def check(fields: dict[str, Any]) -> None:
    check_values(Endpoint.CHAT, fields, LIMITS, {})


@pytest.mark.engine
@pytest.mark.parametrize(("name", "value"), CASES)
def test_the_ranges_are_vllms(name: str, value: Any) -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    try:
        SamplingParams(max_tokens=9, **{name: value})
    except VLLMValidationError:
        with pytest.raises(InvalidValueError) as caught:
            check({name: value})
        assert caught.value.param == name
        assert caught.value.code == "invalid_value"
        assert str(value) in caught.value.message
    else:
        check({name: value})


def test_a_message_has_the_range_and_other_types_pass() -> None:
    with pytest.raises(InvalidValueError, match="'min_p' must be between 0 and 1, got 2"):
        check({"min_p": 2})
    with pytest.raises(InvalidValueError, match="'min_tokens' must be at least 0, got -1"):
        check({"min_tokens": -1})
    with pytest.raises(InvalidValueError, match=f"between -1 and {2**63 - 1}, got {2**64}"):
        check({"top_k": 2**64})
    check({"min_p": None, "top_k": "many", "min_tokens": True})


@pytest.mark.engine
@pytest.mark.parametrize("length", [1, 2**31])
def test_floats_hold_the_score_of_beams_within_the_range(length: int) -> None:
    from vllm.entrypoints.generate.beam_search.utils import get_beam_search_score

    for penalty in (-32, 32):
        check({"length_penalty": penalty})
        score = get_beam_search_score([5] * 4, -9.0, 2, penalty)
        assert math.isfinite(score)
        assert 0 < length**penalty < math.inf
    for penalty in (-32.1, 1000):
        with pytest.raises(InvalidValueError, match="'length_penalty' must be between -32 and 32"):
            check({"length_penalty": penalty})
