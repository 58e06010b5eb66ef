"""Dense decoders of many families give the tokens of transformers, with no code of their own."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm import ModelRegistry, SamplingParams
from vllm.model_executor.layers import rotary_embedding

from rbln_backend.worker.graph_factory import PROGRAM_FILE
from tests.checkpoint_families import OTHERS, REQUIRED
from tests.engine.conftest import Engine, Engines
from tests.engine.test_equality import make_prompts
from tests.reference import Reference, reference_generate

pytestmark = [
    pytest.mark.engine,
    # Of vLLM's own reading of a configuration.
    pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated:FutureWarning"),
]

NUM_TOKENS = 64
LONGEST_PROMPT = 4 * 48
# Few graphs: a chunk shorter and one longer than every window, a batch of one and of more. No
# window but starcoder2's is a whole number of blocks, and olmo3's is less than one.
OPTIONS: dict[str, Any] = {"max_model_len": LONGEST_PROMPT + NUM_TOKENS, "block_size": 32}
SHAPES: dict[str, Any] = {
    "prefill_chunk_buckets": [16, 64],
    "decode_batch_bucket_strategy": "manual",
    "decode_batch_bucket_manual_buckets": [1, 4],
    # Room for all prompts, so that each can be hit.
    "window_prefix_tokens": 4096,
}
NUM_GRAPHS = 5
# vLLM lets these layers look back one token more than transformers does.
DEVIATIONS: dict[str, dict[str, Any]] = {"cohere2": {"hf_overrides": {"sliding_window": 47}}}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)


def prompt_lengths(checkpoint: Path) -> list[int]:
    """One token, both sides of the window, up to four windows; 48 stands for a missing window."""
    config = json.loads((checkpoint / "config.json").read_text())
    window = config.get("sliding_window") or 48
    return [1, 5, window - 1, window, window + 1, 2 * window, 4 * window]


def import_model(checkpoint: Path) -> None:
    """Let vLLM look at the model's class in this process; it would start one for every family."""
    (name,) = json.loads((checkpoint / "config.json").read_text())["architectures"]
    if name in ModelRegistry.models:
        ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


@contextmanager
def running(engines: Engines, arch: str, cache_root: Path) -> Iterator[Engine]:
    """An engine that is gone afterwards: there are too many families to keep theirs."""
    rbln = {**SHAPES, "cache_root": str(cache_root)}
    # Tables that vLLM's models share within a process, and glm changes.
    rotary_embedding._ROPE_DICT.clear()
    engine = engines.fresh(arch, rbln=rbln, **OPTIONS, **DEVIATIONS.get(arch, {}))
    try:
        yield engine
    finally:
        engine.llm.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()


def assert_equal(outputs: list[Any], expected: list[Reference]) -> None:
    for output, reference in zip(outputs, expected, strict=True):
        length, (completion,) = len(output.prompt_token_ids), output.outputs
        assert list(completion.token_ids) == reference.token_ids, f"prompt of {length} tokens"
        for position, entries in enumerate(completion.logprobs):
            assert reference.token_ids[position] in entries
            for token, entry in entries.items():
                wanted = float(reference.logprobs[position, token])
                assert entry.logprob == pytest.approx(wanted, abs=1e-3)


@pytest.mark.parametrize("arch", REQUIRED)
def test_a_family(engines: Engines, tmp_path: Path, arch: str) -> None:
    checkpoint = engines.checkpoints(arch)
    import_model(checkpoint)
    prompts = make_prompts(prompt_lengths(checkpoint), seed=60)
    # Before any engine: vLLM wraps the classes of transformers that it runs itself.
    expected = [reference_generate(checkpoint, prompt, NUM_TOKENS) for prompt in prompts]
    with running(engines, arch, tmp_path) as engine:
        alone = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
        again = engine.generate(prompts, GREEDY)
    assert_equal(alone, expected)
    assert any(output.num_cached_tokens for output in again)
    assert_equal(again, expected)
    with running(engines, arch, tmp_path) as engine:
        assert engine.total("rbln_compile_cache_requests_total", result="hit") == NUM_GRAPHS
        together = engine.generate(prompts, GREEDY)
    assert {output.num_cached_tokens for output in together} == {0}
    assert_equal(together, expected)


@pytest.mark.parametrize("arch", OTHERS)
def test_another_family(engines: Engines, tmp_path: Path, arch: str) -> None:
    checkpoint = engines.checkpoints(arch)
    import_model(checkpoint)
    prompts = make_prompts(prompt_lengths(checkpoint), seed=61)
    expected = [reference_generate(checkpoint, prompt, NUM_TOKENS) for prompt in prompts]
    with running(engines, arch, tmp_path) as engine:
        together = engine.generate(prompts, GREEDY)
        again = engine.generate(prompts, GREEDY)
    assert_equal(together, expected)
    assert_equal(again, expected)
    assert len(list(tmp_path.rglob(PROGRAM_FILE))) == NUM_GRAPHS, "every program can be stored"
