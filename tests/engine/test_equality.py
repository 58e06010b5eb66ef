"""Tokens and log-probabilities equal transformers in float32, however a prompt is cut up."""

from __future__ import annotations

import random

import pytest
from vllm import SamplingParams

from tests.engine.conftest import Engine, Engines
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

# The biases of qwen2 are also in test_families.py, as those of opt.
ARCHITECTURES = ["llama", pytest.param("qwen2", marks=pytest.mark.wide), "qwen3"]
# One token, both sides of a block (16), of a chunk (64), several chunks, up to the context's end.
PROMPT_LENGTHS = [1, 2, 15, 16, 17, 63, 64, 65, 130, 223]
NUM_TOKENS = 33


def make_prompts(lengths: list[int], seed: int = 7) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(10, 500) for _ in range(length)] for length in lengths]


GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)


def assert_equals_reference(
    engine: Engine, prompts: list[list[int]], outputs: list, num_tokens: int = NUM_TOKENS
) -> None:
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_generate(engine.checkpoint, prompt, num_tokens)
        completion = output.outputs[0]
        assert list(completion.token_ids) == expected.token_ids, f"prompt of {len(prompt)} tokens"
        for position, token in enumerate(expected.token_ids):
            actual = completion.logprobs[position]
            for token_id, entry in actual.items():
                reference = float(expected.logprobs[position, token_id])
                assert entry.logprob == pytest.approx(reference, abs=1e-3)
            assert token in actual


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_prompt_alone(engines: Engines, arch: str) -> None:
    engine = engines(arch)
    for prompt in make_prompts(PROMPT_LENGTHS):
        assert_equals_reference(engine, [prompt], engine.generate([prompt], GREEDY))


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_all_prompts_in_one_batch(engines: Engines, arch: str) -> None:
    engine = engines(arch)
    prompts = make_prompts(PROMPT_LENGTHS, seed=8)
    assert_equals_reference(engine, prompts, engine.generate(prompts, GREEDY))


def test_prompt_logprobs(engines: Engines) -> None:
    engine = engines("llama")
    prompts = make_prompts([1, 2, 64, 65, 150], seed=9)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, prompt_logprobs=2)
    for prompt, output in zip(prompts, engine.generate(prompts, params), strict=True):
        assert len(output.prompt_logprobs) == len(prompt)
        assert output.prompt_logprobs[0] is None
        for position in range(1, len(prompt)):
            reference = reference_generate(engine.checkpoint, prompt[:position], 1)
            entries = output.prompt_logprobs[position]
            assert prompt[position] in entries
            for token_id, entry in entries.items():
                expected = float(reference.logprobs[0, token_id])
                assert entry.logprob == pytest.approx(expected, abs=1e-3)


def test_bfloat16_stays_close_to_the_reference(engines: Engines) -> None:
    engine = engines("llama", dtype="bfloat16")
    (prompt,) = make_prompts([100], seed=10)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    (output,) = engine.generate([prompt], params)
    expected = reference_generate(engine.checkpoint, prompt, 1).logprobs[0]
    for token_id, entry in output.outputs[0].logprobs[0].items():
        assert entry.logprob == pytest.approx(float(expected[token_id]), abs=0.5)


def test_nothing_was_compiled_after_warm_up(engines: Engines) -> None:
    engine = engines("llama")
    engine.generate(make_prompts([3, 70, 200], seed=11), GREEDY)
    assert engine.total("rbln_recompiles_after_warmup_total") == 0
    assert engine.total("rbln_bucket_steps_total") > 0
