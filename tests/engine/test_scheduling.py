"""Preemption, prefix hits, aborts and company change no token and leak no block."""

import itertools
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from vllm import SamplingParams

from rbln_backend.config import BACKGROUND_PRIORITY, FIRST_PRIORITY
from tests.engine.conftest import Engine, Engines
from tests.engine.support import FEW, Stepped, make_prompts
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

# Full attention, sliding windows alone, and both: windows of 40 and 48 over chunks of 64.
KINDS = pytest.mark.parametrize("arch", ["llama", "mistral", "gemma3_text"])


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def tokens(outputs: list[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("reuses", [False, True])
@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_preempted_requests_continue_exactly(engines: Engines, arch: str, reuses: bool) -> None:
    # 17 usable blocks of 16 for four requests that end at 6 blocks each.
    engine = engines(arch, num_gpu_blocks_override=18, enable_prefix_caching=reuses)
    prompts = make_prompts([40, 45, 50, 55], seed=1)
    before = _preemptions(engine)
    outputs = engine.generate(prompts, greedy(40))
    assert _preemptions(engine) > before
    for prompt, actual in zip(prompts, tokens(outputs), strict=True):
        assert actual == reference_generate(engine.checkpoint, prompt, 40).token_ids
    assert engine.used_blocks() == 0


def _preemptions(engine: Engine) -> int:
    """Counted where the scheduler does it: resets of a request's computed tokens."""
    scheduler = engine.core.scheduler
    if not hasattr(scheduler, "preemptions_seen"):
        scheduler.preemptions_seen = 0
        original = scheduler._preempt_request

        def counting(*args: Any, **kwargs: Any) -> Any:
            scheduler.preemptions_seen += 1
            return original(*args, **kwargs)

        scheduler._preempt_request = counting
    return int(scheduler.preemptions_seen)


# What one prompt of 150 tokens leaves for the next: whole blocks of 16, or the end of the last
# chunk that filled a window, or heads of blocks of 64 and pages of 8.
EVENTS = {"kv_events_config": {"enable_kv_cache_events": True, "publisher": "null"}}
HEADS: dict[str, Any] = {"block_size": 64, "rbln": FEW | {"sub_block_size": 8}, **EVENTS}
REUSE = [
    ("llama", {}, 144),
    ("mistral", {}, 144),
    ("gemma3_text", {}, 144),
    ("llama", HEADS, 144),
    ("gemma3_text", HEADS, 144),
]


@pytest.mark.parametrize(("arch", "options", "expected"), REUSE)
def test_a_prefix_hit_changes_no_token(
    engines: Engines, arch: str, options: dict[str, Any], expected: int
) -> None:
    engine = engines(arch, **options)
    (shared,) = make_prompts([150], seed=2)
    first, second = [*shared, 11, 12], [*shared, 13]
    engine.generate([first], greedy(4))
    hits = engine.total("rbln_prefix_hit_tokens_total")
    (output,) = engine.generate([second], greedy(20))
    assert output.num_cached_tokens == expected
    assert engine.total("rbln_prefix_hit_tokens_total") == hits + expected
    assert tokens([output]) == [reference_generate(engine.checkpoint, second, 20).token_ids]


@pytest.mark.parametrize("mode", ["full", "incremental", "anything"])
@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_reports_of_reused_blocks_change_no_token(engines: Engines, arch: str, mode: str) -> None:
    """A hit ends inside a block here, and the pages of a window are no blocks at all."""
    engine = engines(arch, **HEADS)
    (shared,) = make_prompts([150], seed=14)
    params = greedy(6)
    params.extra_args = {"kv_cache_report_mode": mode}
    for tail in (11, 12, 13):
        prompt = [*shared, tail]
        (output,) = engine.generate([prompt], params)
        assert tokens([output]) == [reference_generate(engine.checkpoint, prompt, 6).token_ids]
    assert output.num_cached_tokens == 144


def test_without_window_logs_prefix_caching_is_off(engines: Engines) -> None:
    engine = engines("gemma3_text", rbln={"window_prefix_cache": False})
    (prompt,) = make_prompts([150], seed=2)
    for _ in range(2):
        (output,) = engine.generate([prompt], greedy(20))
        assert not output.num_cached_tokens
        assert tokens([output]) == [reference_generate(engine.checkpoint, prompt, 20).token_ids]
    assert engine.core.vllm_config.cache_config.enable_prefix_caching is False


@KINDS
def test_a_whole_prompt_hit_decodes_at_once(engines: Engines, arch: str) -> None:
    engine = engines(arch)
    (prompt,) = make_prompts([97], seed=3)
    (fresh,) = engine.generate([prompt], greedy(20))
    before = engine.total("rbln_bucket_steps_total", phase="prefill")
    (again,) = engine.generate([prompt], greedy(20))
    assert again.num_cached_tokens == 96
    assert engine.total("rbln_bucket_steps_total", phase="prefill") == before
    assert tokens([again]) == tokens([fresh])


def test_cache_salt_isolates_prefixes(engines: Engines) -> None:
    engine = engines("llama")
    (prompt,) = make_prompts([64], seed=4)
    engine.generate([prompt], greedy(2))
    inputs = [{"prompt_token_ids": prompt, "cache_salt": "other tenant"}]
    (output,) = engine.llm.generate(inputs, greedy(2), use_tqdm=False)
    assert output.num_cached_tokens == 0


@KINDS
def test_decodes_go_on_between_the_chunks_of_a_long_prompt(engines: Engines, arch: str) -> None:
    engine = engines(arch)
    queue, (short, long) = Stepped(engine), make_prompts([5, 250], seed=5)
    queue.add("short", short, greedy(30))
    queue.step(3)
    queue.add("long", long, greedy(2))
    progress = 0
    while "long" not in queue.begun:
        moved = queue.step()
        progress += "long" not in moved and "short" in moved
    # Four chunks of the long prompt, and a token of the short stream between any two.
    assert progress >= 3
    queue.to_the_end()
    queue.assert_exact()


@pytest.mark.parametrize(("steps", "expected"), [(0, [0, 0, 0]), (3, [3, 3, 3])])
def test_the_ratio_of_decode_steps_to_chunks_is_a_setting(
    engines: Engines, steps: int, expected: list[int]
) -> None:
    engine = engines("llama", rbln={"decode_steps_per_chunk": steps}, enable_prefix_caching=False)
    queue, (short, long) = Stepped(engine), make_prompts([5, 250], seed=5)
    queue.add("short", short, greedy(60))
    queue.step(3)
    queue.add("long", long, greedy(2))
    phases = []
    while len(phases) < 40 and phases.count("prefill") < 4:
        before = engine.total("rbln_bucket_steps_total", phase="prefill")
        queue.step()
        ran_chunk = engine.total("rbln_bucket_steps_total", phase="prefill") > before
        phases.append("prefill" if ran_chunk else "decode")
    chunks = [index for index, phase in enumerate(phases) if phase == "prefill"]
    between = [later - earlier - 1 for earlier, later in itertools.pairwise(chunks)]
    assert between == expected
    queue.to_the_end()


# Window blocks of "mistral" are vLLM's own pool: three requests' worth make the fourth wait.
MIXES = [
    ("llama", 40, 0),
    ("mistral", 4, 2),
    ("gemma3_text", 40, 3),
    *(pytest.param("llama", 40, seed, marks=pytest.mark.wide) for seed in (1, 3, 4)),
]


@pytest.mark.parametrize(("arch", "num_blocks", "seed"), MIXES)
def test_any_mix_of_requests_and_aborts_returns_every_block(
    engines: Engines, arch: str, num_blocks: int, seed: int
) -> None:
    engine = engines(arch, num_gpu_blocks_override=num_blocks)
    rng, queue = random.Random(seed), Stepped(engine)
    for number in range(60):
        length = rng.choice([1, 2, 16, 17, 64, 65, 128, 200, 250])
        # Up to the end of the context, or for a few blocks.
        params = _random_params(rng, max_tokens=rng.randrange(1, min(256 - length, 90) + 1))
        queue.add(str(number), make_prompts([length], seed=number % 7)[0], params)
        queue.step(rng.randrange(0, 12))
        if rng.random() < 0.3 and queue.going:
            queue.abort(rng.choice(queue.going))
    queue.to_the_end()
    queue.core.step()
    assert sorted(queue.finished) == sorted(queue.requests), "none ends twice or after its abort"
    assert len(queue.requests) < 60
    assert engine.used_blocks() == 0
    assert engine.total("rbln_kv_blocks_used") == 0
    assert engine.total("rbln_recompiles_after_warmup_total") == 0


def _random_params(rng: random.Random, max_tokens: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=rng.choice([0.0, 0.7, 1.5]),
        top_p=rng.choice([1.0, 0.9]),
        top_k=rng.choice([0, 5]),
        min_p=rng.choice([0.0, 0.1]),
        presence_penalty=rng.choice([0.0, 0.5]),
        repetition_penalty=rng.choice([1.0, 1.2]),
        seed=rng.choice([None, 3]),
        logprobs=rng.choice([None, 2]),
        logit_bias=rng.choice([None, {20: 3.0}]),
        min_tokens=rng.choice([0, 1]),
    )


@KINDS
def test_most_tokens_query_no_group_for_blocks(engines: Engines, arch: str) -> None:
    """vLLM's scheduler calls ``allocate_slots`` with the options of our manager's fast path."""
    engine = engines(arch)
    coordinator = engine.core.scheduler.kv_cache_manager.coordinator
    original, queries = coordinator.get_num_blocks_to_allocate, 0

    def counting(*args: Any, **kwargs: Any) -> Any:
        nonlocal queries
        queries += 1
        return original(*args, **kwargs)

    coordinator.get_num_blocks_to_allocate = counting
    try:
        engine.generate(make_prompts([20], seed=3), greedy(64))
    finally:
        del coordinator.get_num_blocks_to_allocate
    assert 0 < queries < 64 / 2


# -------------------------------------------------------------------------------- scheduler options
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
    heat, queue = 0.0 if seed is None else 1.0, Stepped(engine)
    for step in range(STEPS):
        for number, (at, prompt, count, priority) in enumerate(arrivals):
            if at == step:
                params = SamplingParams(
                    temperature=heat, seed=seed, max_tokens=count, ignore_eos=True
                )
                queue.add(str(number), prompt, params, priority=priority)
        queue.step()
        if len(queue.finished) == len(arrivals):
            break
    left = queue.going
    queue.core.abort_request(left)
    queue.core.step()
    assert left == [], f"unfinished after {STEPS} steps"
    return [queue.tokens[str(number)] for number in range(len(arrivals))]


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
    for _ in range(6):
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


# ----------------------------------------------------------------------------------- priority first
def test_they_pass_all_who_wait(engines: Engines) -> None:
    queue = Stepped(engines.fresh("llama", max_num_seqs=2))
    prompts = make_prompts([20, 33, 41, 25, 50, 60], seed=93)
    for number in range(4):
        queue.add(f"came-{number}", prompts[number], greedy(12))
    for number in (4, 5):
        queue.add(f"first-{number}", prompts[number], greedy(12), priority=FIRST_PRIORITY)
    queue.to_the_end()
    # No request had begun. Shorter prompts come first within a class; with room for both in a
    # chunk, the first two of a class begin together.
    assert queue.begun == ["first-4", "first-5", "came-0", "came-3", "came-1", "came-2"]
    queue.assert_exact()


# ------------------------------------------------------------------------------------ prefill order
def first_tokens(engine: Engine, arrivals: list[tuple[int, list[int]]]) -> list[str]:
    """Return the names of requests (step of arrival, prompt) by their first tokens."""
    queue = Stepped(engine)
    for step in range(STEPS):
        for number, (at, prompt) in enumerate(arrivals):
            if at == step:
                queue.add(str(number), prompt, greedy(2))
        queue.step()
        if len(queue.finished) == len(arrivals):
            break
    return queue.begun


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


@pytest.mark.parametrize(
    ("arch", "options"), [("llama", {}), ("gemma3_text", {}), ("deepseek_v2", {"rbln": FEW})]
)
def test_partly_computed_prompts_keep_their_tokens(
    engines: Engines, arch: str, options: dict[str, Any]
) -> None:
    engine, rng = engines(arch, **options), random.Random(63)
    prompts = make_prompts([rng.choice([5, 20, 60, 130, 200]) for _ in range(16)], seed=64)
    alone = [run(engine, [(0, prompt, 4, 0)])[0] for prompt in prompts]
    for _ in range(4):
        chosen = rng.sample(range(len(prompts)), 8)
        arrivals = [(rng.randrange(12), prompts[n], 4, 0) for n in chosen]
        engine.core.scheduler.reset_prefix_cache()
        assert run(engine, arrivals) == [alone[n] for n in chosen]
        assert engine.used_blocks() == 0
