"""Preemption, prefix hits, aborts and company change no token and leak no block."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts
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
HEADS = {"block_size": 64, "rbln": {"sub_block_size": 8}, **EVENTS}
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
    llm_engine = engine.llm.llm_engine
    short, long = make_prompts([5, 250], seed=5)
    _add(llm_engine, "short", short, greedy(30))
    for _ in range(3):
        llm_engine.step()
    _add(llm_engine, "long", long, greedy(2))
    progress = []
    done: dict[str, Any] = {}
    while llm_engine.has_unfinished_requests():
        for output in llm_engine.step():
            done[output.request_id] = output
            if output.request_id == "short" and "long" not in done:
                progress.append(len(output.outputs[0].token_ids))
    # Four chunks of the long prompt, and a token of the short stream between any two.
    assert len(progress) >= 3
    assert tokens([done["short"], done["long"]]) == [
        reference_generate(engine.checkpoint, short, 30).token_ids,
        reference_generate(engine.checkpoint, long, 2).token_ids,
    ]


@pytest.mark.parametrize(("steps", "expected"), [(0, [0, 0, 0]), (3, [3, 3, 3])])
def test_the_ratio_of_decode_steps_to_chunks_is_a_setting(
    engines: Engines, steps: int, expected: list[int]
) -> None:
    engine = engines("llama", rbln={"decode_steps_per_chunk": steps}, enable_prefix_caching=False)
    llm_engine = engine.llm.llm_engine
    short, long = make_prompts([5, 250], seed=5)
    _add(llm_engine, "short", short, greedy(60))
    for _ in range(3):
        llm_engine.step()
    _add(llm_engine, "long", long, greedy(2))
    phases = []
    while len(phases) < 40 and phases.count("prefill") < 4:
        before = engine.total("rbln_bucket_steps_total", phase="prefill")
        llm_engine.step()
        ran_chunk = engine.total("rbln_bucket_steps_total", phase="prefill") > before
        phases.append("prefill" if ran_chunk else "decode")
    chunks = [index for index, phase in enumerate(phases) if phase == "prefill"]
    between = [later - earlier - 1 for earlier, later in itertools.pairwise(chunks)]
    assert between == expected
    while llm_engine.has_unfinished_requests():
        llm_engine.step()


def _add(llm_engine: Any, request_id: str, prompt: list[int], params: SamplingParams) -> None:
    params = params.clone()
    params.output_kind = RequestOutputKind.CUMULATIVE
    llm_engine.add_request(request_id, {"prompt_token_ids": prompt}, params)


# Window blocks of "mistral" are vLLM's own pool: three requests' worth make the fourth wait.
MIXES = [
    ("llama", 40, 0),
    ("llama", 40, 1),
    ("llama", 40, 3),
    ("llama", 40, 4),
    ("mistral", 4, 2),
    ("gemma3_text", 40, 3),
]


@pytest.mark.parametrize(("arch", "num_blocks", "seed"), MIXES)
def test_any_mix_of_requests_and_aborts_returns_every_block(
    engines: Engines, arch: str, num_blocks: int, seed: int
) -> None:
    engine = engines(arch, num_gpu_blocks_override=num_blocks)
    llm_engine = engine.llm.llm_engine
    rng = random.Random(seed)
    open_ids: set[str] = set()
    finished: set[str] = set()
    aborted: set[str] = set()
    for number in range(60):
        request_id = f"{seed}-{number}"
        length = rng.choice([1, 2, 16, 17, 64, 65, 128, 200, 250])
        params = _random_params(rng, max_tokens=rng.randrange(1, 256 - length + 1))
        _add(llm_engine, request_id, make_prompts([length], seed=number % 7)[0], params)
        open_ids.add(request_id)
        for _ in range(rng.randrange(0, 12)):
            finished |= {o.request_id for o in llm_engine.step() if o.finished}
        candidates = sorted(open_ids - finished - aborted)
        if rng.random() < 0.3 and candidates:
            victim = rng.choice(candidates)
            llm_engine.abort_request([victim])
            aborted.add(victim)
    while llm_engine.has_unfinished_requests():
        finished |= {o.request_id for o in llm_engine.step() if o.finished}
    llm_engine.step()
    assert finished | aborted == open_ids
    assert not finished & aborted
    assert aborted
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
