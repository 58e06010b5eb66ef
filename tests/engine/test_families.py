"""Dense decoders of many families give the tokens of transformers, with no code of their own."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.model_executor.layers import rotary_embedding

from rbln_backend.store.artifact_files import PROGRAM
from tests.checkpoint_families import OTHERS, REQUIRED
from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts
from tests.graph_cache import graph_cache
from tests.reference import Reference, reference_generate

# One of each kind of attention, position and norm; the others are wide. The norms of qwen3 are in
# test_equality.py.
ALWAYS = {"llama", "mistral", "gemma3_text", "gpt_neox", "opt"}

pytestmark = [
    pytest.mark.engine,
    # Of vLLM's own reading of a configuration.
    pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning"),
]

LONGEST_PROMPT = 4 * 48
NUM_TOKENS = 64
# No window but starcoder2's is a whole number of blocks, and olmo3's is less than one.
OPTIONS: dict[str, Any] = {"max_model_len": LONGEST_PROMPT + NUM_TOKENS, "block_size": 32}
# Few graphs: for a chunk shorter and one longer than every window, one request and more.
CHUNKS, BATCHES = [16, 64], [1, 4]
# vLLM lets these layers look back one token more than transformers does.
DEVIATIONS: dict[str, dict[str, Any]] = {"cohere2": {"hf_overrides": {"sliding_window": 47}}}
# vLLM takes the error function for bloom's GELU, transformers its approximation by tanh.
TOLERANCES = {"bloom": 1e-2}


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, logprobs=3)


def prompt_lengths(checkpoint: Path) -> list[int]:
    """One token, both sides of the window, up to four windows; 48 stands for a missing window."""
    config = json.loads((checkpoint / "config.json").read_text())
    window = config.get("sliding_window") or 48
    return [1, 5, window - 1, window, window + 1, 2 * window, 4 * window]


@contextmanager
def running(
    engines: Engines,
    arch: str,
    cache_root: Path,
    chunks: list[int],
    batches: list[int],
    **options: Any,
) -> Iterator[Engine]:
    """An engine that is gone afterwards: there are too many families to keep theirs."""
    rbln = {
        "cache_root": str(cache_root),
        "prefill_chunk_buckets": chunks,
        "decode_batch_bucket_strategy": "manual",
        "decode_batch_bucket_manual_buckets": batches,
        # Room for all prompts, so that each can be hit.
        "window_prefix_tokens": 4096,
    }
    # Tables that vLLM's models share within a process, and glm changes.
    rotary_embedding._ROPE_DICT.clear()
    engine = engines.fresh(arch, rbln=rbln, **(OPTIONS | DEVIATIONS.get(arch, {}) | options))
    try:
        yield engine
    finally:
        engine.llm.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


def assert_equal(outputs: list[Any], expected: list[Reference], tolerance: float = 1e-3) -> None:
    for output, reference in zip(outputs, expected, strict=True):
        length, (completion,) = len(output.prompt_token_ids), output.outputs
        assert list(completion.token_ids) == reference.token_ids, f"prompt of {length} tokens"
        for position, entries in enumerate(completion.logprobs):
            assert reference.token_ids[position] in entries
            for token, entry in entries.items():
                wanted = float(reference.logprobs[position, token])
                assert entry.logprob == pytest.approx(wanted, abs=tolerance)


def references(checkpoint: Path, prompts: list[list[int]], num_tokens: int) -> list[Reference]:
    """To be made before any engine: vLLM wraps the classes of transformers that it runs itself."""
    return [reference_generate(checkpoint, prompt, num_tokens) for prompt in prompts]


@pytest.mark.parametrize(
    "arch",
    [pytest.param(arch, marks=() if arch in ALWAYS else pytest.mark.wide) for arch in REQUIRED],
)
def test_a_family(engines: Engines, tmp_path: Path, arch: str) -> None:
    checkpoint = engines.checkpoints(arch)
    prompts, params = make_prompts(prompt_lengths(checkpoint), seed=60), greedy(NUM_TOKENS)
    expected = references(checkpoint, prompts, NUM_TOKENS)
    # One family starts without any graph in every run.
    root = tmp_path if arch == "llama" else graph_cache()
    with running(engines, arch, root, CHUNKS, BATCHES) as engine:
        alone = [engine.generate([prompt], params)[0] for prompt in prompts]
        again = engine.generate(prompts, params)
    assert_equal(alone, expected)
    assert any(output.num_cached_tokens for output in again)
    assert_equal(again, expected)
    with running(engines, arch, root, CHUNKS, BATCHES) as engine:
        assert engine.total("rbln_compile_cache_requests_total", result="miss") == 0
        together = engine.generate(prompts, params)
    assert {output.num_cached_tokens for output in together} == {0}
    assert_equal(together, expected)


@pytest.mark.wide
@pytest.mark.parametrize("arch", OTHERS)
def test_another_family(engines: Engines, tmp_path: Path, arch: str) -> None:
    checkpoint = engines.checkpoints(arch)
    prompts, params = make_prompts(prompt_lengths(checkpoint), seed=61), greedy(24)
    expected = references(checkpoint, prompts, 24)
    with running(engines, arch, tmp_path, CHUNKS[-1:], BATCHES[-1:]) as engine:
        together = engine.generate(prompts, params)
        again = engine.generate(prompts, params)
    tolerance = TOLERANCES.get(arch, 1e-3)
    assert_equal(together, expected, tolerance)
    assert_equal(again, expected, tolerance)
    # One each for prefill, decode and the logits of prompts.
    assert len(list(tmp_path.rglob(PROGRAM))) == 3, "every program can be stored"
