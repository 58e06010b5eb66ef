"""Bucket sets that change while requests run: same tokens, no compile in a step, no graph left."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from rbln_backend.speculation.chooser import Chooser, StepChoice
from rbln_backend.worker.buckets.bucket_change import BucketChange
from tests.engine.conftest import Engine, Engines
from tests.engine.oracle import MOST
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.engine.test_equality import make_prompts
from tests.engine.test_pooling import EMBED, assert_close, vectors
from tests.engine.test_scheduling import greedy, tokens
from tests.fitted_drafts import FITTED

pytestmark = pytest.mark.engine

SIZES: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 128}
START = {"decode": [1, 2, 4, 8], "prefill": [16, 32, 64, 128]}
CHANGES = [
    {"decode": [3, 8], "prefill": START["prefill"]},
    {"decode": [3, 5, 8], "prefill": [24, 128]},
    START,
]


def _call(engine: Engine, method: str, *arguments: Any) -> Any:
    return engine.core.collective_rpc(method, args=arguments)[0]


def _change_while(engine: Engine, sizes: dict[str, list[int]], step: Callable[[], None]) -> Any:
    """Change the sizes with a step between any two pieces of work; return the last report."""
    report = _call(engine, "start_bucket_change", sizes["decode"], sizes["prefill"])
    while report["phase"] not in ("done", "failed"):
        step()
        report = _call(engine, "advance_bucket_change", report["phase"])
    return report


def _run_changes(engine: Engine, prompts: list[list[int]]) -> dict[str, list[int]]:
    """Change the sizes at all of `CHANGES` while `prompts` run, over and over.

    Returns the tokens of each request; its name is its number.
    """
    llm, numbers = engine.llm.llm_engine, count()
    results: dict[str, list[int]] = {}

    def step() -> None:
        # One request joins at a time, and few at first, so that batches of all sizes run.
        if llm.get_num_unfinished_requests() < 3 + len(results) % 6:
            number = next(numbers)
            prompt = {"prompt_token_ids": prompts[number % len(prompts)]}
            llm.add_request(str(number), prompt, greedy(24))
        for output in llm.step():
            if output.finished:
                results[output.request_id] = list(output.outputs[0].token_ids)

    for sizes in CHANGES:
        report = _change_while(engine, sizes, step)
        assert report["error"] is None
        assert report["done"] == report["total"]
        state = _call(engine, "bucket_state")
        assert {name: state[name] for name in START} == sizes
        # Twice all numbers of requests at once, however many steps the change took.
        enough = len(results) + 12
        while len(results) < enough:
            step()
        _call(engine, "release_graphs")
        verify = _call(engine, "bucket_state")["verify"]
        assert _call(engine, "bucket_state")["graphs"] == verify + sum(map(len, sizes.values()))
    return results


@pytest.mark.parametrize("drafts", [None, "suffix", pytest.param("medusa", marks=pytest.mark.wide)])
def test_changes_while_requests_run_change_no_token(
    engines: Engines, monkeypatch: Any, tmp_path: Path, drafts: str | None
) -> None:
    prompts = make_prompts([5, 70, 130, 20, 17, 40, 9, 100], seed=3)
    plain = engines(**SIZES)
    expected = tokens(plain.generate(prompts, greedy(24)))
    speculation = {"method": drafts, "num_speculative_tokens": MOST}
    if drafts in FITTED:
        texts = [prompt + answer for prompt, answer in zip(prompts, expected, strict=True)]
        speculation["model"] = str(FITTED[drafts](tmp_path, plain.checkpoint, texts, last=25))
    engine = engines.fresh(**SIZES, **({"speculative_config": speculation} if drafts else {}))
    # Steps of tiny models take as long with drafts as they happen to.
    monkeypatch.setattr(Chooser, "choose", lambda *_: StepChoice(MOST + 1))
    warm_up = {"kind": "warmup", "key": ""}
    before = engine.total("rbln_device_seconds_total", **warm_up)
    results = _run_changes(engine, prompts)
    assert engine.total("rbln_device_seconds_total", **warm_up) > before, "new graphs ran once"
    assert len(results) >= len(prompts)
    for number, found in results.items():
        assert found == expected[int(number) % len(prompts)]
    if drafts:
        assert engine.total("rbln_draft_accepted_tokens_total", bucket="3x4") > 0
    steps = "rbln_bucket_steps_total"
    for phase, bucket in (("verify", "3x4") if drafts else ("decode", "3"), ("prefill", "24")):
        assert engine.metric(steps, phase=phase, bucket=bucket) > 0
    assert engine.total("rbln_recompiles_after_warmup_total") == 0


def test_changes_while_a_step_is_in_flight_change_no_token(engines: Engines) -> None:
    prompts = make_prompts([5, 70, 130, 20, 17, 40], seed=3)
    expected = tokens(engines(**SIZES).generate(prompts, greedy(24)))
    engine = engines.fresh(**SIZES, async_scheduling=True)
    worker, in_flight = engine.core.model_executor.driver_worker.worker, list[bool]()
    advance = worker.advance_bucket_change

    def seen(phase: str) -> Any:
        in_flight.append(worker._runner._in_flight is not None)
        report = advance(phase)
        assert worker._runner._in_flight is None, "the change waits for the step's end"
        return report

    worker.advance_bucket_change = seen
    results = _run_changes(engine, prompts)
    assert in_flight.count(True) > len(in_flight) / 2
    assert len(results) >= len(prompts)
    for number, found in results.items():
        assert found == expected[int(number) % len(prompts)]
    assert engine.total("rbln_recompiles_after_warmup_total") == 0


def test_a_failed_change_leaves_the_sizes(engines: Engines, monkeypatch: Any) -> None:
    engine = engines(**SIZES)

    def lose(change: BucketChange) -> Any:
        raise MemoryError("no memory for a capture")

    monkeypatch.setattr(BucketChange, "_make", lose)
    sizes = {"decode": [7, 8], "prefill": START["prefill"]}
    report = _change_while(engine, sizes, lambda: None)
    assert report["phase"] == "failed"
    assert "no memory for a capture" in report["error"]
    assert {name: _call(engine, "bucket_state")[name] for name in START} == START
    assert len(tokens(engine.generate(make_prompts([5] * 7, seed=1), greedy(3)))) == 7


def test_a_model_that_pools_changes_its_chunks(engines: Engines) -> None:
    engine = engines.fresh(**EMBED, **SIZES)
    prompts = make_prompts([5, 70, 130, 20, 17], seed=4)
    expected = vectors(engine, prompts)
    report = _change_while(engine, {"decode": [], "prefill": [24, 128]}, lambda: None)
    assert report["error"] is None
    for actual, before in zip(vectors(engine, prompts), expected, strict=True):
        assert_close(actual, before, "after the change")
    assert engine.metric("rbln_bucket_steps_total", phase="pooling", bucket="24") > 0
    assert engine.total("rbln_recompiles_after_warmup_total") == 0


@pytest.mark.parametrize("ranks", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_ranks_change_between_the_same_steps(engines: Engines, tmp_path: Path, ranks: str) -> None:
    prompts = make_prompts([5, 70, 20, 100], seed=5)
    sizes = {"decode": [1, 4] if ranks == "tensor_parallel_size" else [2], "prefill": [24, 64]}
    alone = engines()
    answers = run_ranks(alone.checkpoint, tmp_path, prompts, sizes=sizes, **{ranks: 2})
    assert_as_one_rank(alone, prompts * 2, answers, tolerance=1e-4)
