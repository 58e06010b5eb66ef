"""The queue of waiting requests: priorities, preemption by priority, the end of a wait."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from rbln_backend.config import QUEUE_TIMEOUT
from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

MAX_QUEUE_S = 60.0


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def engine(engines: Engines) -> Engine:
    # 17 usable blocks of 16: four requests of 6 blocks each do not fit.
    return engines(
        "llama",
        scheduling_policy="priority",
        num_gpu_blocks_override=18,
        rbln={"max_queue_ms": int(MAX_QUEUE_S * 1000)},
    )


CLOCK = Clock()
"""One for all tests, as they share an engine: time does not go back."""


@pytest.fixture
def clock(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(engine.core.scheduler._expiry, "_clock", CLOCK)
    return CLOCK


def add(engine: Engine, request_id: str, prompt: list[int], tokens: int, priority: int = 0) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    params.output_kind = RequestOutputKind.CUMULATIVE
    engine.llm.llm_engine.add_request(
        request_id, {"prompt_token_ids": prompt}, params, priority=priority
    )


def step(engine: Engine, done: dict[str, Any]) -> None:
    for output in engine.llm.llm_engine.step():
        done[output.request_id] = output.outputs[0]


def finish(engine: Engine, done: dict[str, Any]) -> None:
    while engine.llm.llm_engine.has_unfinished_requests():
        step(engine, done)
    engine.llm.llm_engine.step()
    assert engine.used_blocks() == 0


def test_a_request_that_waits_too_long_ends_and_no_other(engine: Engine, clock: Clock) -> None:
    prompts = make_prompts([5, 6, 7, 8, 20, 30], seed=8)
    done: dict[str, Any] = {}
    for number, prompt in enumerate(prompts[:4]):
        add(engine, f"runs-{number}", prompt, 20)
    add(engine, "waits", prompts[4], 2)
    for _ in range(6):
        step(engine, done)
    clock.now += MAX_QUEUE_S - 1
    add(engine, "later", prompts[5], 2)
    step(engine, done)
    assert "waits" not in done
    clock.now += 1.5
    step(engine, done)
    assert done["waits"].finish_reason == "error"
    assert done["waits"].stop_reason == QUEUE_TIMEOUT
    assert list(done["waits"].token_ids) == []
    finish(engine, done)
    for number, prompt in enumerate(prompts[:4]):
        expected = reference_generate(engine.checkpoint, prompt, 20).token_ids
        assert list(done[f"runs-{number}"].token_ids) == expected
    # It waited for a second and a half of its own.
    expected = reference_generate(engine.checkpoint, prompts[5], 2).token_ids
    assert list(done["later"].token_ids) == expected


def test_the_last_waiting_request_ends_although_nothing_runs(engine: Engine, clock: Clock) -> None:
    (prompt,) = make_prompts([20], seed=9)
    done: dict[str, Any] = {}
    add(engine, "waits", prompt, 2)
    clock.now += MAX_QUEUE_S + 1
    step(engine, done)
    assert done["waits"].finish_reason == "error"
    assert not engine.llm.llm_engine.has_unfinished_requests()
    finish(engine, done)


def test_a_long_prefill_is_not_waiting(engine: Engine, clock: Clock) -> None:
    (prompt,) = make_prompts([200], seed=10)
    done: dict[str, Any] = {}
    add(engine, "long", prompt, 3)
    step(engine, done)
    clock.now += 2 * MAX_QUEUE_S
    finish(engine, done)
    assert (
        list(done["long"].token_ids) == reference_generate(engine.checkpoint, prompt, 3).token_ids
    )


def test_an_aborted_or_finished_request_is_not_missed(engine: Engine, clock: Clock) -> None:
    prompts = make_prompts([5, 6], seed=11)
    done: dict[str, Any] = {}
    add(engine, "finishes", prompts[0], 1)
    finish(engine, done)
    add(engine, "aborted", prompts[1], 1)
    engine.llm.llm_engine.abort_request(["aborted"])
    clock.now += 2 * MAX_QUEUE_S
    add(engine, "next", prompts[1], 1)
    finish(engine, done)
    assert done["next"].finish_reason == "length"


def test_waiting_requests_are_served_by_priority(engine: Engine) -> None:
    prompts = make_prompts([5, 6, 7, 8, 9, 10, 11], seed=12)
    done: dict[str, Any] = {}
    for number, prompt in enumerate(prompts[:4]):
        add(engine, f"runs-{number}", prompt, 8 + 4 * number)
    for _ in range(8):
        step(engine, done)
    add(engine, "low", prompts[4], 3, priority=5)
    add(engine, "middle", prompts[5], 3)
    add(engine, "high", prompts[6], 3, priority=-5)
    begun: list[str] = []
    while engine.llm.llm_engine.has_unfinished_requests():
        for output in engine.llm.llm_engine.step():
            if output.request_id not in begun and "runs" not in output.request_id:
                begun.append(output.request_id)
    assert begun == ["high", "middle", "low"]


def test_the_lowest_priority_is_preempted(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = engine.core.scheduler
    preempted: list[int] = []
    original = scheduler._preempt_request

    def noting(request: Any, *args: Any, **kwargs: Any) -> Any:
        preempted.append(request.priority)
        return original(request, *args, **kwargs)

    monkeypatch.setattr(scheduler, "_preempt_request", noting)
    prompts = make_prompts([40, 45, 50, 55], seed=13)
    done: dict[str, Any] = {}
    for number, prompt in enumerate(prompts):
        # The first one, which by the order of arrival would be the last to go.
        add(engine, str(number), prompt, 40, priority=9 if number == 0 else 0)
    finish(engine, done)
    assert preempted
    assert preempted[0] == 9
    for number, prompt in enumerate(prompts):
        expected = reference_generate(engine.checkpoint, prompt, 40).token_ids
        assert list(done[str(number)].token_ids) == expected
