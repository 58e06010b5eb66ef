"""What a router may say about the KV of a prompt, and what could end the engine."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from server.errors import InvalidValueError, UnsupportedFieldError
from server.request.values import check_values
from server.wire.endpoint import Endpoint
from tests.server.request.limits import LIMITS

OFFER: dict[str, Any] = {
    "do_remote_prefill": True,
    "do_remote_decode": False,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_block_ids": [[1, 2], []],
    "remote_host": "10.0.0.1",
    "remote_port": 5600,
    "remote_num_tokens": 20,
    "remote_blocks_expiry_time": None,
    "tp_size": 1,
    "pp_size": 1,
    "dcp_size": 1,
    "transfer_mode": "pull",
    "rbln_prompt_digest": "ab",
}


def check(value: Any, *, is_on: bool = True, **body: Any) -> None:
    limits = replace(LIMITS, transfers_kv=is_on)
    check_values(Endpoint.CHAT, {**body, "kv_transfer_params": value}, limits, {})


def test_an_offer_passes() -> None:
    check(OFFER)
    check({"do_remote_decode": True}, n=1)
    check({}, is_on=False)


@pytest.mark.parametrize(
    "wrong",
    [
        {"remote_block_ids": [1, 2]},
        {"remote_block_ids": [["1"]]},
        {"remote_block_ids": [[-1]]},
        {"remote_port": 0},
        {"remote_port": True},
        {"remote_host": "a\nb"},
        {"tp_size": 0},
        {"transfer_mode": "push"},
        {"do_remote_prefill": 1},
        {"other": 1},
    ],
)
def test_what_vllms_connector_would_fail_on_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(InvalidValueError) as error:
        check({**OFFER, **wrong})
    assert error.value.param == f"kv_transfer_params.{next(iter(wrong))}"


def test_requests_that_carry_no_offer() -> None:
    with pytest.raises(UnsupportedFieldError, match="NixlConnector"):
        check(OFFER, is_on=False)
    for body in ({"n": 2}, {"use_beam_search": True}):
        with pytest.raises(InvalidValueError, match="n=1"):
            check(OFFER, **body)
    with pytest.raises(InvalidValueError, match="an object"):
        check([OFFER])
