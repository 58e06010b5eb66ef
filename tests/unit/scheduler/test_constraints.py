"""The device's scheduling rules."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from rbln_backend.scheduler.steps import (
    can_decode,
    decode_share,
    is_prefill,
    prefill_block_reason,
)


@pytest.mark.parametrize(
    ("num_computed", "num_tokens", "expected"),
    [
        pytest.param(0, 1, False, id="one-token prompt decodes at once"),
        pytest.param(0, 2, True, id="fresh prompt"),
        pytest.param(99, 100, False, id="prefix hit that leaves one token"),
        pytest.param(98, 100, True, id="last chunk of two tokens"),
        pytest.param(100, 101, False, id="decoding"),
    ],
)
def test_is_prefill(num_computed: int, num_tokens: int, expected: bool) -> None:
    assert is_prefill(num_computed, num_tokens) is expected


@pytest.mark.parametrize(("num_computed", "num_tokens"), [(0, 1), (99, 100)])
def test_a_request_that_pools_never_decodes(num_computed: int, num_tokens: int) -> None:
    assert is_prefill(num_computed, num_tokens, pools=True)


@dataclass
class Decoding:
    """A request of 10 prompt tokens that may answer with 5."""

    num_computed_tokens: int
    num_tokens: int
    num_output_placeholders: int = 0
    pooling_params: object = None
    num_prompt_tokens: int = 10
    max_tokens: int = 5


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        pytest.param(Decoding(10, 11), True, id="its token is known"),
        pytest.param(Decoding(11, 11), False, id="a running step computes its token"),
        pytest.param(Decoding(10, 10, 1), True, id="the last chunk makes its token"),
        pytest.param(Decoding(11, 10, 2), True, id="two steps have not ended"),
        pytest.param(Decoding(13, 13, 1), True, id="one more after that in flight"),
        pytest.param(Decoding(14, 14, 1), False, id="the token in flight is its last"),
        pytest.param(Decoding(4, 10), False, id="its prompt needs a chunk"),
    ],
)
def test_can_decode(request_: Decoding, expected: bool) -> None:
    assert can_decode(request_) is expected


def reason(**overrides: int | bool) -> str | None:
    facts = {
        "num_prefilling": 0,
        "num_waiting": 1,
        "num_running": 0,
        "max_num_seqs": 4,
        "decodes_owed": False,
    } | overrides
    return prefill_block_reason(**facts)  # type: ignore[arg-type]


def test_a_waiting_request_may_start() -> None:
    assert reason() is None


def test_an_unfinished_prefill_needs_no_free_slot() -> None:
    assert reason(num_prefilling=1, num_waiting=0, num_running=4) is None


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"decodes_owed": True, "num_prefilling": 1}, "decoding requests take this step"),
        ({"num_waiting": 0}, "no request waits"),
        ({"num_running": 4}, "all 4 sequence slots are taken"),
    ],
)
def test_reasons(facts: dict[str, int | bool], text: str) -> None:
    assert text in (reason(**facts) or "")


@pytest.mark.parametrize(
    ("num_decoding", "max_num_seqs", "stages", "share"),
    [
        pytest.param(5, 8, 1, 5, id="one stage takes all"),
        pytest.param(8, 8, 2, 4, id="half each"),
        pytest.param(3, 8, 2, 2, id="of few an equal part, rounded up"),
        pytest.param(1, 8, 4, 1, id="never none"),
        pytest.param(9, 9, 2, 4, id="never more than the largest bucket"),
    ],
)
def test_stages_share_what_decodes(
    num_decoding: int, max_num_seqs: int, stages: int, share: int
) -> None:
    assert decode_share(num_decoding, max_num_seqs, stages) == share
