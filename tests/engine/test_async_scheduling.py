"""With asynchronous scheduling every answer is that of an engine without it."""

import random
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.adapters import make_adapter
from tests.engine.conftest import Engine, Engines
from tests.engine.support import FEW, FEWER, make_prompts
from tests.engine.test_equality import FEATURES, PREEMPTING, Company
from tests.engine.test_lora import LORA

pytestmark = pytest.mark.engine

ENDS: tuple[dict[str, Any], ...] = (
    {},
    {},
    {"max_tokens": 1},
    {"max_tokens": 2},
    {"stop_token_ids": [*range(0, 4096, 5)]},
    {"stop_token_ids": [*range(0, 4096, 3)], "min_tokens": 3},
    {"stop": ["a", "e"]},
    {"temperature": 1.0, "seed": 11, "presence_penalty": 0.5},
    # As far as the context goes.
    {"max_tokens": 10_000},
)
Work = list[tuple[list[int], dict[str, Any]]]


def make_work(seed: int, count: int) -> Work:
    """Prompts, many with a beginning in common, and their parameters."""
    rng = random.Random(seed)
    own = make_prompts([rng.choice([1, 2, 16, 17, 33, 64, 65, 100]) for _ in range(count)], seed)
    (shared,) = make_prompts([90], seed + 1)
    work: Work = []
    for prompt in own:
        options = rng.choice((rng.choice(FEATURES), rng.choice(ENDS), rng.choice(ENDS)))
        begins = shared[: rng.choice([0, 0, 32, 80])]
        whole = (begins + prompt)[:190]
        most = min(options.get("max_tokens", rng.randrange(4, 40)), 256 - len(whole))
        work.append((whole, {"ignore_eos": rng.random() < 0.5, **options, "max_tokens": most}))
    return work


def play(engine: Engine, work: Work, seed: int) -> Company:
    """Requests come at random steps, and some are aborted."""
    engine.core.scheduler.reset_prefix_cache()
    company, rng = Company(engine), random.Random(seed)
    for number, (prompt, options) in enumerate(work):
        company.ask(str(number), prompt, options)
        company.step(rng.randrange(5))
        if number % 7 == 6 and company.going:
            company.abort(rng.choice(sorted(company.going)))
    company.to_the_end()
    return company


@pytest.mark.parametrize(
    ("arch", "options"),
    [("llama", {}), ("llama", PREEMPTING), ("gemma3_text", {}), ("qwen3_moe", {"rbln": FEW})],
    ids=["llama", "preempted", "windows", "experts"],
)
def test_answers_are_the_same(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, arch: str, options: dict[str, Any]
) -> None:
    work = make_work(5, 40)
    plain = play(engines(arch, **options), work, 1)
    engine = engines(arch, async_scheduling=True, **options)
    preempted, preempt = list[Any](), engine.core.scheduler._preempt_request

    def seen(request: Any, *args: Any, **named: Any) -> None:
        preempted.append(request.num_in_flight_tokens)
        preempt(request, *args, **named)

    monkeypatch.setattr(engine.core.scheduler, "_preempt_request", seen)
    # Which requests meet depends on the measured times of steps, too.
    for seed in range(2, 8):
        company = play(engine, work, seed)
        both = plain.requests.keys() & company.requests.keys()
        assert len(both) > len(work) / 2
        for name in both:
            assert company.answer(name) == plain.answer(name), work[int(name)]
        if any(preempted) or options != PREEMPTING:
            break
    assert engine.total("rbln_recompiles_after_warmup_total") == 0
    # Some while a step computes a token of theirs.
    assert any(preempted) == (options == PREEMPTING)


def test_a_step_is_planned_while_another_runs(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert engines("llama").core.vllm_config.scheduler_config.async_scheduling is False
    engine = engines("llama", async_scheduling=True)
    scheduler, runner = engine.core.scheduler, engine.core.model_executor.driver_worker.worker
    planned: list[bool] = []
    schedule = scheduler.schedule

    def seen(*args: Any) -> Any:
        planned.append(runner._runner._in_flight is not None)
        return schedule(*args)

    monkeypatch.setattr(scheduler, "schedule", seen)
    company = Company(engine)
    company.ask("0", make_prompts([20], seed=1)[0], {"max_tokens": 12})
    company.to_the_end()
    # All but the first, and one after the last.
    assert planned.count(True) >= 12
    assert len(company.tokens["0"]) == 12


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"async_scheduling": True},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}, "rbln": FEWER},
    ],
    ids=["plain", "in flight", "drafts"],
)
def test_a_request_without_a_token_left_ends_alone(
    engines: Engines, options: dict[str, Any]
) -> None:
    """The fifth exclamation mark in a row is forbidden, and no other token is allowed."""
    company = Company(engines("llama", **options))
    ends = {"allowed_token_ids": [4], "bad_words": ["!!!!!"], "max_tokens": 40}
    stays = {"max_tokens": 40, "temperature": 1.0, "seed": 3}
    others: list[dict[str, Any]] = [{}, {"logprobs": 2}, {"temperature": 1.0, "seed": 1}]
    (prompt,) = make_prompts([40], seed=9)
    company.ask("alone", prompt, stays)
    company.to_the_end()
    company.ask("beside", prompt, stays)
    for number, other in enumerate(others):
        company.ask(str(number), prompt, ends | other)
    company.to_the_end()
    assert company.answer("beside") == company.answer("alone")
    for number in range(len(others)):
        assert company.answer(str(number))[:2] == ([4] * 4, "error")


@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_what_is_computed_after_a_stop_is_dropped(engines: Engines, arch: str) -> None:
    """The token after a stop reaches neither the client nor the cache."""
    plain, engine = engines(arch), engines(arch, async_scheduling=True)
    (prompt,) = make_prompts([40], seed=9)
    whole = Company(plain)
    whole.ask("0", prompt, {"max_tokens": 60})
    whole.to_the_end()
    tokens = whole.tokens["0"]
    engine.core.scheduler.reset_prefix_cache()
    company = Company(engine)
    for end in (1, 8, 24, 25, 39):
        stop = tokens[end]
        first = tokens.index(stop)
        company.ask(f"stop-{end}", prompt, {"max_tokens": 60, "stop_token_ids": [stop]})
        company.to_the_end()
        assert company.answer(f"stop-{end}")[:2] == (tokens[: first + 1], "stop")
        # Its beginning is the whole answer: a hit, up to the last whole unit of it.
        rest = {"max_tokens": 60 - first - 1}
        company.ask(f"rest-{end}", prompt + tokens[: first + 1], rest)
        company.to_the_end()
        assert company.tokens[f"rest-{end}"] == tokens[first + 1 :]


def test_adapters_are_loaded_and_removed_while_a_step_runs(
    engines: Engines, tmp_path: Path
) -> None:
    """Beside an answer without an adapter; each adapter takes the slot of the one before."""
    lora = LORA | {"max_loras": 1, "rbln": FEW}
    plain, engine = engines("llama", **lora), engines("llama", async_scheduling=True, **lora)
    base, prompt = make_prompts([20, 30], seed=12)
    adapters = [
        LoRARequest(f"a{n}", n, str(make_adapter(plain.checkpoint, tmp_path / str(n), seed=n)))
        for n in (1, 2, 3)
    ]
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    inputs, expected = {"prompt_token_ids": prompt}, {}
    (whole,) = plain.generate([base], long)
    for adapter in adapters:
        (output,) = plain.llm.generate(inputs, greedy, use_tqdm=False, lora_request=adapter)
        expected[adapter.lora_name] = list(output.outputs[0].token_ids)
        plain.core.model_executor.driver_worker.worker.remove_lora(adapter.lora_int_id)
    assert len({tuple(tokens) for tokens in expected.values()}) == len(adapters)

    llm, worker = engine.llm.llm_engine, engine.core.model_executor.driver_worker.worker
    answers: dict[str, list[int]] = {}

    def step() -> None:
        for output in llm.step():
            if output.finished:
                answers[output.request_id] = list(output.outputs[0].token_ids)

    llm.add_request("base", {"prompt_token_ids": base}, long)
    for adapter in adapters:
        while worker._runner._in_flight is None:
            step()
        assert worker.add_lora(adapter)
        assert worker._runner._in_flight is None, "the slot is filled after the step's end"
        llm.add_request(adapter.lora_name, inputs, greedy, lora_request=adapter)
        while adapter.lora_name not in answers or worker._runner._in_flight is None:
            step()
        assert worker.remove_lora(adapter.lora_int_id)
        assert worker._runner._in_flight is None
    assert "base" not in answers
    while llm.has_unfinished_requests():
        step()
    assert answers.pop("base") == list(whole.outputs[0].token_ids)
    assert answers == expected


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
        ({"runner": "pooling"}, "--runner pooling"),
        ({"kv_offloading_size": 1.0, "kv_offloading_backend": "native"}, "KV tiers"),
    ],
)
def test_other_engines_refuse_it(engines: Engines, options: dict[str, Any], setting: str) -> None:
    with pytest.raises(ValueError, match=f"--async-scheduling with {setting}"):
        engines.fresh("llama", async_scheduling=True, **options)


def test_tokens_that_a_reset_drops_are_computed_again(engines: Engines) -> None:
    """A reset preempts a request whose step has not ended; vLLM drops that step's token."""
    (prompt,) = make_prompts([40], seed=4)
    answers = []
    for number, options in enumerate(({}, {"async_scheduling": True})):
        engine = engines("llama", **options)
        company = Company(engine)
        company.ask(str(number), prompt, {"max_tokens": 30})
        for step in range(12):
            company.step()
            if number and step in (5, 9):
                assert engine.core.reset_prefix_cache(reset_running_requests=True)
        company.to_the_end()
        answers.append(company.tokens[str(number)])
    assert answers[1] == answers[0]
