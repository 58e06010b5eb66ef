"""Prompts that are partly computed at the same time: their order, and equal tokens."""

from __future__ import annotations

import random

import pytest

from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts
from tests.engine.test_scheduler_options import limited, run

pytestmark = pytest.mark.engine


def first_tokens(engine: Engine, arrivals: list[tuple[int, list[int]]]) -> list[str]:
    """Return the names of requests (step of arrival, prompt) by their first tokens."""
    from vllm import SamplingParams

    core, names = engine.llm.llm_engine, list[str]()
    step = 0
    while len(names) < len(arrivals) or core.has_unfinished_requests():
        for number, (at, prompt) in enumerate(arrivals):
            if at == step:
                params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
                core.add_request(str(number), {"prompt_token_ids": prompt}, params)
        names += [o.request_id for o in core.step() if o.request_id not in names]
        step += 1
    return names


def test_a_short_prompt_overtakes_a_long_one_in_its_prefill(engines: Engines) -> None:
    engine = engines("llama")
    prompts = make_prompts([250, 20, 30], seed=61)
    arrivals = [(0, prompts[0]), (1, prompts[1]), (2, prompts[2])]
    overtaken = engine.total("rbln_prefill_overtaken_total")
    known = engine.total("rbln_first_token_seconds_count", prompt="to_256")
    engine.core.scheduler.reset_prefix_cache()
    assert first_tokens(engine, arrivals) == ["1", "2", "0"]
    assert engine.total("rbln_prefill_overtaken_total") == overtaken + 1
    assert engine.total("rbln_first_token_seconds_count", prompt="to_256") == known + 3
    engine.core.scheduler.reset_prefix_cache()
    with limited(engine, _order=None):
        assert first_tokens(engine, arrivals) == ["0", "1", "2"]


def test_no_more_long_prompts_are_partly_computed_than_the_limit(engines: Engines) -> None:
    """The second prompt has fewer tokens left than the first one after its first chunk."""
    engine = engines("llama")
    arrivals = list(enumerate(make_prompts([250, 130, 20], seed=62)))
    for most, order in ((1, ["2", "0", "1"]), (2, ["2", "1", "0"])):
        engine.core.scheduler.reset_prefix_cache()
        with limited(engine, _most_partial=most):
            assert first_tokens(engine, arrivals) == order


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", "deepseek_v2"])
def test_partly_computed_prompts_keep_their_tokens(engines: Engines, arch: str) -> None:
    engine, rng = engines(arch), random.Random(63)
    prompts = make_prompts([rng.choice([5, 20, 60, 130, 200]) for _ in range(16)], seed=64)
    alone = [run(engine, [(0, prompt, 4, 0)])[0] for prompt in prompts]
    for _ in range(4):
        chosen = rng.sample(range(len(prompts)), 8)
        arrivals = [(rng.randrange(12), prompts[n], 4, 0) for n in chosen]
        engine.core.scheduler.reset_prefix_cache()
        assert run(engine, arrivals) == [alone[n] for n in chosen]
        assert engine.used_blocks() == 0
