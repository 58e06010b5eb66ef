"""gpt-oss: experts with biases, sinks in every layer, every other layer a sliding window."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import SamplingParams

from tests.engine.conftest import Engines
from tests.engine.test_equality import assert_equals_reference, make_prompts
from tests.engine.test_padding import poison_padding
from tests.engine.test_scheduling import greedy, tokens
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

NUM_TOKENS = 64
# One token, both sides of the window (48) and of a chunk (64), up to four windows: the context.
PROMPT_LENGTHS = [1, 2, 15, 47, 48, 49, 64, 65, 97, 145, 192]
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)


@pytest.mark.parametrize("kernels", ["native", pytest.param("aten", marks=pytest.mark.wide)])
def test_each_prompt_alone(engines: Engines, kernels: str) -> None:
    engine = engines("gpt_oss", rbln={"kernels": kernels})
    for prompt in make_prompts(PROMPT_LENGTHS, seed=40):
        outputs = engine.generate([prompt], GREEDY)
        assert_equals_reference(engine, [prompt], outputs, NUM_TOKENS)


@pytest.mark.parametrize("kernels", ["native", "aten"])
def test_all_prompts_in_one_batch(engines: Engines, kernels: str) -> None:
    engine = engines("gpt_oss", rbln={"kernels": kernels})
    prompts = make_prompts(PROMPT_LENGTHS, seed=41)
    assert_equals_reference(engine, prompts, engine.generate(prompts, GREEDY), NUM_TOKENS)


def test_a_prefix_hit_changes_no_token(engines: Engines) -> None:
    engine = engines("gpt_oss", rbln={"kernels": "native"})
    head, *tails = make_prompts([130, 1, 30, 60], seed=42)
    engine.generate([head], greedy(1))
    prompts = [head + tail for tail in tails]
    outputs = engine.generate(prompts, GREEDY)
    assert [output.num_cached_tokens for output in outputs] == [128, 128, 128]
    assert_equals_reference(engine, prompts, outputs, NUM_TOKENS)


def test_nan_in_padded_rows_changes_no_token(engines: Engines, tmp_path: Path) -> None:
    poisoned = poison_padding(engines.checkpoints("gpt_oss"), tmp_path / "model")
    engine = engines.fresh("gpt_oss", checkpoint=poisoned)
    # Prompts of 5 and 70 leave padded rows in their chunks, three requests one in the batch.
    prompts = make_prompts([5, 70, 130], seed=43)
    for prompt, output in zip(prompts, engine.generate(prompts, greedy(30)), strict=True):
        expected = reference_generate(engines.checkpoints("gpt_oss"), prompt, 30)
        assert tokens([output]) == [expected.token_ids]


def test_stored_programs_read_the_weights_and_sinks_of_the_model_at_hand(engines: Engines) -> None:
    engines("gpt_oss", rbln={"kernels": "native"})
    other = engines.checkpoints("gpt_oss", seed=1)
    engine = engines.fresh("gpt_oss", checkpoint=other, rbln={"kernels": "native"})
    assert engine.total("rbln_compile_cache_requests_total", result="miss") == 0
    assert engine.total("rbln_compile_cache_requests_total", result="hit") > 0
    prompts = make_prompts([20, 100], seed=44)
    assert_equals_reference(engine, prompts, engine.generate(prompts, GREEDY), NUM_TOKENS)


def test_bfloat16_stays_close_to_the_reference(engines: Engines) -> None:
    engine = engines("gpt_oss", dtype="bfloat16")
    (prompt,) = make_prompts([100], seed=45)
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=5)
    (output,) = engine.generate([prompt], params)
    expected = reference_generate(engine.checkpoint, prompt, 1).logprobs[0]
    for token_id, entry in output.outputs[0].logprobs[0].items():
        assert entry.logprob == pytest.approx(float(expected[token_id]), abs=0.5)
