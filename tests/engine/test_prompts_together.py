"""Prompts that share a prefill step have the bits that each has alone."""

from __future__ import annotations

from typing import Any

import pytest
from vllm import SamplingParams

from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import assert_equals_reference, make_prompts

pytestmark = pytest.mark.engine

# 58 tokens for a chunk of 64: one prompt of a single token, and both sides of a page of 16.
LENGTHS = [23, 1, 17, 17]
NUM_TOKENS = 6
PARAMS = SamplingParams(
    temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3, prompt_logprobs=1
)
SEEDED = SamplingParams(temperature=0.9, seed=5, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)


def outcome(output: Any) -> list[Any]:
    """Return the tokens and all their log-probabilities."""
    (completion,) = output.outputs
    steps = [*completion.logprobs, *filter(None, output.prompt_logprobs or ())]
    logprobs = [{token: entry.logprob for token, entry in step.items()} for step in steps]
    return [list(completion.token_ids), logprobs]


def steps(engine: Engine) -> tuple[float, float]:
    """Prefill steps, and the prompts in them."""
    names = ("rbln_bucket_steps_total", "rbln_bucket_useful_rows_total")
    counts = [engine.total(name, phase="prefill") for name in names]
    return counts[0], counts[1]


def run(engine: Engine, prompts: list[list[int]], params: Any) -> tuple[list[Any], float, float]:
    """The answers, prefill steps and prompts in them; nothing is hit."""
    engine.core.scheduler.reset_prefix_cache()
    before = steps(engine)
    outputs = engine.generate(prompts, params)
    taken, held = steps(engine)
    return outputs, taken - before[0], held - before[1]


def assert_bits_of_each_alone(engine: Engine, seed: int) -> None:
    prompts = make_prompts(LENGTHS, seed=seed)
    for params in (PARAMS, SEEDED):
        alone = [outcome(run(engine, [prompt], params)[0][0]) for prompt in prompts]
        outputs, taken, held = run(engine, prompts, params)
        assert (taken, held) == (1, 4)
        assert [outcome(output) for output in outputs] == alone
    assert engine.total("rbln_recompiles_after_warmup_total") == 0


def test_in_bfloat16(engines: Engines) -> None:
    assert_bits_of_each_alone(engines("llama", dtype="bfloat16"), seed=71)


def test_the_tokens_are_those_of_the_reference(engines: Engines) -> None:
    engine = engines("llama")
    prompts = make_prompts(LENGTHS, seed=72)
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3)
    outputs, taken, _ = run(engine, prompts, params)
    assert taken == 1
    assert_equals_reference(engine, prompts, outputs, 20)


def test_a_prefix_is_computed_once(engines: Engines) -> None:
    engine = engines("llama")
    (stem,) = make_prompts([32], seed=73)
    prompts = [stem + tail for tail in make_prompts([5, 6, 7], seed=74)]
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=3)
    outputs, taken, held = run(engine, prompts, params)
    # The first computes it, the other two hit it and share a step.
    assert (taken, held) == (2, 3)
    assert [output.num_cached_tokens for output in outputs] == [0, 32, 32]
    assert_equals_reference(engine, prompts, outputs, 20)


@pytest.mark.wide
def test_one_prompt_a_step_is_a_setting(engines: Engines) -> None:
    engine = engines("llama", rbln={"prefill_prompts": 1})
    _, taken, held = run(engine, make_prompts(LENGTHS, seed=72), PARAMS)
    # A prompt of one token has no chunk.
    assert (taken, held) == (3, 3)


@pytest.mark.parametrize(
    ("options", "rbln"),
    [({}, {"use_custom_kernel": True}), ({"runner": "pooling"}, {})],
)
def test_where_a_step_has_one_prompt_more_are_refused(
    engines: Engines, options: dict[str, Any], rbln: dict[str, Any]
) -> None:
    with pytest.raises(ValueError, match=r"several prompts in one prefill step.*prefill_prompts"):
        engines.fresh("llama", rbln={"prefill_prompts": 2, **rbln}, **options)


# Windows and pages, a window alone, sinks, latent attention, slopes, chunks of the context, caches
# that layers share, experts; values as e4m3.
KINDS = [
    *("gemma3_text", "mistral", "gpt_oss", "deepseek_v3", "bloom", "llama4", "gemma3n_text"),
    *("qwen3_moe", "mixtral", "gemma2"),
]


@pytest.mark.wide
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("arch", KINDS)
def test_every_kind_of_attention(engines: Engines, arch: str, dtype: str) -> None:
    assert_bits_of_each_alone(engines(arch, dtype=dtype), seed=75)


@pytest.mark.wide
@pytest.mark.parametrize("arch", ["llama", "gemma3_text"])
def test_a_cache_of_e4m3(engines: Engines, arch: str) -> None:
    assert_bits_of_each_alone(engines(arch, kv_cache_dtype="fp8"), seed=76)
