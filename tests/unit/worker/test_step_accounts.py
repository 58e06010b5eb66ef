"""Division of steps among accounts: by computed tokens, with nothing left for padding."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from rbln_backend.core import Phase, StepBatch
from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.scheduler.fairness.request_account import RequestAccount
from rbln_backend.worker.step.accounts import MAX_KEYS, StepAccounts

NAME = "rbln_device_seconds_total"


def _state(key: str, adapter: str | None = None, kind: str = "request") -> Any:
    args = RequestAccount(kind, key).as_args() if key or kind != "request" else None
    return SimpleNamespace(
        req_id="",
        sampling_params=SimpleNamespace(extra_args=args),
        pooling_params=None,
        lora_request=adapter and SimpleNamespace(lora_name=adapter),
    )


def _batch(phase: Phase, names: list[str], **fields: Any) -> StepBatch:
    held: Any = SimpleNamespace(req_ids=names)
    return StepBatch(phase, held, len(names), fields.pop("tokens", len(names)), True, **fields)


@pytest.fixture
def board() -> MetricsBoard:
    made = MetricsBoard(None, 0)
    made.gauge("rbln_startup_phase_seconds", phase="warmup").set(2.5)
    return made


def _seconds(board: MetricsBoard, key: str, model: str = "m", kind: str = "request") -> float:
    return board.value(NAME, kind=kind, key=key, model=model)


def test_rows_of_a_decode_step_share_it_with_those_that_prefill(board: MetricsBoard) -> None:
    accounts = StepAccounts(board, "m")
    states = {"1": _state("a"), "2": _state("a"), "3": _state("b", "lora"), "4": _state("")}
    reading = _state("", kind="internal")
    reading.req_id = "5"
    states["5"] = reading
    batch = _batch(Phase.DECODE, ["1", "2", "3", "4"], decode_prefill=[reading])
    for _ in range(4):
        accounts.charge(batch, 0.01, states)
    accounts.flush()
    assert _seconds(board, "a") == pytest.approx(0.016)
    assert _seconds(board, "b", "lora") == pytest.approx(0.008)
    assert _seconds(board, "") == pytest.approx(0.008)
    assert _seconds(board, "", kind="internal") == pytest.approx(0.008)
    assert _seconds(board, "", kind="warmup") == 2.5


def test_chunks_and_drafts_are_charged_by_tokens(board: MetricsBoard) -> None:
    accounts = StepAccounts(board, "m")
    states = {"1": _state("a"), "2": _state("b")}
    # 40 tokens in a chunk of 64: its padding is charged as well.
    accounts.charge(_batch(Phase.PREFILL, ["1", "2"], counts=[10, 30], tokens=40), 4.0, states)
    assert (_seconds(board, "a"), _seconds(board, "b")) == (1.0, 3.0)
    accounts.charge(_batch(Phase.VERIFY, ["1", "2"], drafts=[[7, 7], []], tokens=4), 4.0, states)
    assert (_seconds(board, "a"), _seconds(board, "b")) == (4.0, 4.0)


def test_steps_are_charged_when_the_requests_change_or_end(board: MetricsBoard) -> None:
    accounts = StepAccounts(board, "m")
    states = {"1": _state("a"), "2": _state("b")}
    accounts.charge(_batch(Phase.DECODE, ["1"]), 0.01, states)
    accounts.charge(_batch(Phase.DECODE, ["1"]), 0.01, states)
    assert _seconds(board, "a") == 0
    accounts.charge(_batch(Phase.DECODE, ["2"]), 0.01, states)
    assert _seconds(board, "a") == pytest.approx(0.02)
    accounts.flush()
    assert _seconds(board, "b") == pytest.approx(0.01)
    accounts.charge(None, 0.5, states)
    assert _seconds(board, "", kind="padding") == 0.5


def test_keys_beyond_the_bound_share_a_series(board: MetricsBoard) -> None:
    accounts = StepAccounts(board, "m")
    names = [str(number) for number in range(MAX_KEYS + 5)]
    states = {name: _state(f"key-{name}") for name in names}
    accounts.charge(_batch(Phase.DECODE, names), 1.0, states)
    total = sum(_seconds(board, f"key-{name}") for name in names)
    assert _seconds(board, "other") == pytest.approx(6 / len(names))
    assert total + _seconds(board, "other") == pytest.approx(1.0)


def test_malformed_accounts_are_those_of_no_key() -> None:
    for given in (None, {}, {"account": "alice"}, {"account": ["root", "a"]}, {"account": [1, 2]}):
        assert RequestAccount.of(given) == RequestAccount("request", "")
