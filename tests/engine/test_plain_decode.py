"""Plain decode steps are the steps that the full path would take."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import starmap
from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts
from tests.engine.test_neighbours import PREEMPTING

pytestmark = pytest.mark.engine

STEPS = 70


@dataclass
class Trace:
    """What each step of an engine had; blocks are numbered as they appear, the null block is 0."""

    steps: list[Any] = field(default_factory=list)
    plain: int = 0
    """Steps of the scheduler, and of the runner, that took the short path."""
    plain_runs: int = 0
    preempted: int = 0
    blocks: dict[tuple[int, int], int] = field(default_factory=dict)

    def numbers(self, group: int, blocks: list[int]) -> list[int]:
        """Numbers of the blocks of a KV cache group."""
        return [
            self.blocks.setdefault((group, block), len(self.blocks) + 1) if block else 0
            for block in blocks
        ]

    def scheduled(self, output: Any) -> Any:
        cached = output.scheduled_cached_reqs
        self.steps.append(
            (
                [*map(_name, output.num_scheduled_tokens.items())],
                [*map(_name, cached.req_ids)],
                cached.num_computed_tokens,
                cached.num_output_tokens,
                [ids and [*starmap(self.numbers, enumerate(ids))] for ids in cached.new_block_ids],
                sorted(map(_name, output.finished_req_ids)),
                sorted(map(_name, output.preempted_req_ids or ())),
                output.total_num_scheduled_tokens,
                output.has_structured_output_requests,
            )
        )

    def ran(self, inputs: Any) -> None:
        for name, tensor in inputs.tensors.items():
            values = tensor.flatten().tolist()
            if "block_tables" in name:
                values = self.numbers(int(name.rpartition(".")[2]), values)
            self.steps.append((str(inputs.spec), name, values))


def _name(found: Any) -> Any:
    """The caller's name of a request, without vLLM's suffix."""
    return (_name(found[0]), found[1]) if isinstance(found, tuple) else found.split("-")[0]


@contextmanager
def traced(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, plain: bool) -> Iterator[Trace]:
    trace, scheduler = Trace(), engine.core.scheduler
    steps = engine.core.model_executor.driver_worker.worker._runner
    with monkeypatch.context() as patch:
        if not plain:
            patch.setattr(scheduler._plain, "_is_allowed", False)
            patch.setattr(steps, "_is_sole", False)

        def around(owner: Any, name: str, see: Callable[..., None]) -> None:
            method = getattr(owner, name)

            def seen(*args: Any, **options: Any) -> Any:
                result = method(*args, **options)
                see(result, *args)
                return result

            patch.setattr(owner, name, seen)

        def count(name: str, result: Any) -> None:
            setattr(trace, name, getattr(trace, name) + (result is not None))

        around(scheduler, "schedule", lambda output, *_: trace.scheduled(output))
        around(scheduler, "_preempt_request", lambda *_: count("preempted", True))
        around(scheduler._plain, "schedule", lambda found, *_: count("plain", found))
        around(steps, "run_plain", lambda found, *_: count("plain_runs", found))
        around(steps, "_run", lambda _, step, *__: trace.ran(step.inputs))
        yield trace


def params_of(rng: random.Random, number: int) -> SamplingParams:
    """Parameters of which none, or one, ends an answer or changes it."""
    special: dict[str, Any] = rng.choice(
        [{}, {}, {"logprobs": 2}, {"presence_penalty": 1.5}, {"min_tokens": 4}]
    )
    return SamplingParams(
        temperature=rng.choice([0.0, 1.0]),
        seed=number,
        max_tokens=rng.randint(4, 100),
        stop_token_ids=rng.sample(range(3, 200), rng.choice([0, 0, 20])),
        **special,
    )


def play(engine: Engine, seed: int, trace: Trace, pace: float) -> None:
    """Requests join, leave, are aborted and end, at random, the same for each ``seed``."""
    rng, core = random.Random(seed), engine.llm.llm_engine
    engine.core.scheduler.reset_prefix_cache()
    prompts, live, added = make_prompts([rng.randint(1, 40) for _ in range(14)], seed=seed), [], 0
    for step in range(400):
        while added < len(prompts) and (step < STEPS or not live) and rng.random() < pace:
            core.add_request(
                str(added), {"prompt_token_ids": prompts[added]}, params_of(rng, added)
            )
            live.append(str(added))
            added += 1
        if live and rng.random() < 0.02:
            core.abort_request([live.pop(rng.randrange(len(live)))])
        for output in core.step():
            given = output.outputs[0]
            trace.steps.append((output.request_id, list(given.token_ids), str(given.logprobs)))
            if output.finished:
                live.remove(output.request_id)
        if added == len(prompts) and not live:
            break
    core.step()
    assert not live
    assert engine.used_blocks() == 0


@pytest.mark.parametrize(
    ("arch", "options"),
    [("llama", {}), ("llama", PREEMPTING), ("gemma3_text", {})],
    ids=["blocks", "preempted", "windows"],
)
def test_plain_steps_have_the_inputs_of_full_ones(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, arch: str, options: dict[str, Any]
) -> None:
    engine = engines(arch, **options)
    # Other tests share the engine: the worker learns of their last requests here.
    engine.llm.llm_engine.step()
    plain_steps, preempted = 0, 0
    pace = 0.9 if options else 0.3
    for seed in range(2):
        with traced(engine, monkeypatch, plain=False) as full:
            play(engine, seed, full, pace)
        with traced(engine, monkeypatch, plain=True) as plain:
            play(engine, seed, plain, pace)
        for number, (expected, found) in enumerate(zip(full.steps, plain.steps, strict=True)):
            assert found == expected, f"seed {seed}, record {number}"
        assert (full.plain, full.plain_runs) == (0, 0)
        plain_steps += min(plain.plain, plain.plain_runs)
        preempted += plain.preempted
    assert plain_steps > 40
    assert bool(preempted) is bool(options)
