"""Whatever the scheduler's limits, every request ends, with the tokens that it has alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import SamplingParams

from rbln_backend.config import BACKGROUND_PRIORITY, FIRST_PRIORITY
from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts

pytestmark = pytest.mark.engine

# The longest prompts take eight chunks of 16; a request that waits for all others still ends.
STEPS = 3000
PRIORITIES = [0, 0, 0, 3, FIRST_PRIORITY, BACKGROUND_PRIORITY]
TIGHT = {"num_gpu_blocks_override": 18, "scheduling_policy": "priority"}


@contextmanager
def limited(engine: Engine, **limits: Any) -> Iterator[None]:
    """Run the engine with other limits, as if it had been started with them."""
    scheduler = engine.core.scheduler
    owners = {
        name: scheduler if hasattr(scheduler, name) else scheduler.scheduler_config
        for name in limits
    }
    before = {name: getattr(owner, name) for name, owner in owners.items()}
    for name, owner in owners.items():
        setattr(owner, name, limits[name])
    try:
        yield
    finally:
        for name, owner in owners.items():
            setattr(owner, name, before[name])


def run(
    engine: Engine, arrivals: list[tuple[int, list[int], int, int]], seed: int | None = None
) -> list[list[int]]:
    """The tokens of requests (step of its arrival, prompt, number of tokens, priority)."""
    heat = 0.0 if seed is None else 1.0
    core, tokens = engine.llm.llm_engine, dict[str, list[int]]()
    for step in range(STEPS):
        for number, (at, prompt, count, priority) in enumerate(arrivals):
            if at == step:
                inputs = {"prompt_token_ids": prompt}
                params = SamplingParams(
                    temperature=heat, seed=seed, max_tokens=count, ignore_eos=True
                )
                core.add_request(str(number), inputs, params, priority=priority)
        for output in core.step():
            if output.finished:
                tokens[output.request_id] = list(output.outputs[0].token_ids)
        if len(tokens) == len(arrivals):
            break
    left = {*map(str, range(len(arrivals)))} - tokens.keys()
    core.abort_request(list(left))
    core.step()
    assert left == set(), f"unfinished after {STEPS} steps"
    return [tokens[str(number)] for number in range(len(arrivals))]


def test_a_short_prompt_ends_beside_a_long_one_that_is_cut(engines: Engines) -> None:
    """The last chunk and a half of the long one would fit into a chunk with the short one."""
    engine = engines("llama")
    prompts = make_prompts([120, 10], seed=51)
    alone = [run(engine, [(0, prompt, 5, 0)])[0] for prompt in prompts]
    for at in range(12):
        engine.core.scheduler.reset_prefix_cache()
        with limited(engine, long_prefill_token_threshold=16):
            together = run(engine, [(0, prompts[0], 5, 0), (at, prompts[1], 5, 0)])
        assert together == alone


def test_a_prompt_that_is_cut_in_a_shared_chunk_goes_on_after_it(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan does not expect a cut of vLLM's scheduler: it costs a step and no answer."""
    engine = engines("llama")
    prompts = make_prompts([30, 10, 12], seed=54)
    monkeypatch.setattr(engine.core.scheduler, "_most_of_a_prompt", lambda tokens: tokens)
    for seed in (None, 3):
        alone = [run(engine, [(0, prompt, 5, 0)], seed)[0] for prompt in prompts]
        engine.core.scheduler.reset_prefix_cache()
        before = engine.total("rbln_bucket_steps_total", phase="prefill")
        with limited(engine, long_prefill_token_threshold=16):
            together = run(engine, [(0, prompt, 5, 0) for prompt in prompts], seed)
        assert together == alone
        assert engine.total("rbln_bucket_steps_total", phase="prefill") == before + 2


def test_a_chunk_of_one_token_is_no_decode_step(engines: Engines) -> None:
    """Nothing is sampled in it; the last token of a prompt decodes."""
    engine = engines("llama")
    prompts = make_prompts([10, 7], seed=56)
    alone = [run(engine, [(0, prompt, 5, 0)])[0] for prompt in prompts]
    for number, prompt in enumerate(prompts):
        engine.core.scheduler.reset_prefix_cache()
        before = engine.total("rbln_bucket_steps_total", phase="prefill")
        with limited(engine, long_prefill_token_threshold=1):
            assert run(engine, [(0, prompt, 5, 0)]) == [alone[number]]
        steps = engine.total("rbln_bucket_steps_total", phase="prefill") - before
        assert steps == len(prompt) - 1
    engine.core.scheduler.reset_prefix_cache()
    with limited(engine, long_prefill_token_threshold=1):
        assert run(engine, [(0, prompt, 5, 0) for prompt in prompts]) == alone


def test_a_step_takes_no_more_than_its_budget(engines: Engines) -> None:
    """A chunk of 64 tokens would hold all of them."""
    engine = engines("llama")
    prompts = make_prompts([20, 21, 22], seed=55)
    engine.core.scheduler.reset_prefix_cache()
    before = engine.total("rbln_bucket_steps_total", phase="prefill", bucket="64")
    with limited(engine, max_num_scheduled_tokens=30):
        run(engine, [(0, prompt, 3, 0) for prompt in prompts])
    assert engine.total("rbln_bucket_steps_total", phase="prefill", bucket="64") == before


@pytest.mark.parametrize("options", [{}, TIGHT], ids=["first come", "priority"])
def test_every_request_ends(engines: Engines, options: dict[str, Any]) -> None:
    engine, rng = engines("llama", **options), random.Random(52)
    prompts = make_prompts([1 + (7 * n) % 130 for n in range(24)], seed=53)
    counts = [rng.randrange(1, 20) for _ in prompts]
    alone = [run(engine, [(0, *case, 0)])[0] for case in zip(prompts, counts, strict=True)]
    order = engine.core.scheduler._order
    for _ in range(12):
        limits = {
            "long_prefill_token_threshold": rng.choice([0, 0, 1, 7, 16, 33, 50, 100]),
            "max_num_scheduled_tokens": rng.choice([64, 64, 50, 17]),
            "max_num_running_reqs": rng.choice([1, 2, 4, 4]),
            "_decode_steps_per_chunk": rng.choice([0, 1, 1, 4]),
            "_order": rng.choice([order, order, None]),
            "_most_partial": rng.choice([1, 2, 4]),
        }
        chosen = rng.sample(range(len(prompts)), 10)
        arrivals = [
            (rng.randrange(60), prompts[n], counts[n], rng.choice(PRIORITIES)) for n in chosen
        ]
        engine.core.scheduler.reset_prefix_cache()
        with limited(engine, **limits):
            together = run(engine, arrivals)
        assert together == [alone[n] for n in chosen], limits
        assert engine.used_blocks() == 0
    assert engine.total("rbln_recompiles_after_warmup_total") == 0
