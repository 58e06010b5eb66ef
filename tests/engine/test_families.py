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

from rbln_backend.graphs.artifacts import PROGRAM
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
# Others than the checkpoints': heads that fill no vector, sizes that no tile divides.
SHAPES: list[dict[str, int]] = [
    {"hidden_size": 96, "intermediate_size": 328, "num_attention_heads": 3, "head_dim": 32},
    {"hidden_size": 160, "intermediate_size": 200, "num_attention_heads": 2, "head_dim": 80},
    {"hidden_size": 192, "intermediate_size": 136, "num_attention_heads": 12, "head_dim": 16},
    {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64},
]
# The number of a shape, key-value heads and layers, and what follows from them in a family.
SHAPED: dict[str, tuple[int, int, int, dict[str, Any]]] = {
    "llama": (0, 1, 2, {}),
    "qwen2": (2, 4, 4, {}),
    "qwen3": (1, 1, 2, {}),
    "mistral": (2, 3, 2, {"sliding_window": 40}),
    "phi3": (1, 2, 2, {}),
    "gemma2": (2, 6, 4, {"query_pre_attn_scalar": 16}),
    "gemma3_text": (0, 1, 4, {"query_pre_attn_scalar": 32}),
    "starcoder2": (3, 2, 4, {"sliding_window": 64}),
    "exaone4": (2, 2, 4, {}),
    "olmo2": (0, 3, 2, {}),
    "olmo3": (3, 4, 4, {}),
    "granite": (1, 2, 4, {}),
    "opt": (2, 12, 2, {"ffn_dim": 136}),
    "gpt_neox": (3, 4, 2, {}),
    "gpt_bigcode": (0, 1, 2, {}),
    "bloom": (3, 4, 2, {}),
    "cohere2": (1, 1, 4, {}),
    "mixtral": (0, 1, 2, {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "qwen3_moe": (2, 2, 2, {"num_experts": 6, "num_experts_per_tok": 2}),
    "deepseek_v3": (1, 2, 3, {"kv_lora_rank": 40, "q_lora_rank": 56, "head_dim": ...}),
}
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


@pytest.mark.parametrize(
    "arch",
    [pytest.param(arch, marks=() if arch == "starcoder2" else pytest.mark.wide) for arch in SHAPED],
)
def test_a_family_of_another_shape(engines: Engines, tmp_path: Path, arch: str) -> None:
    shape, kv_heads, layers, fields = SHAPED[arch]
    overrides = SHAPES[shape] | {"num_key_value_heads": kv_heads, "num_hidden_layers": layers}
    checkpoint = engines.checkpoints(arch, **{**overrides, **fields})
    prompts, params = make_prompts([1, 2, 33, 64, 130, 257], seed=62), greedy(24)
    expected = references(checkpoint, prompts, 24)
    for misses in (True, False):
        # All of this project's own choices: chunks, buckets, kernels.
        engine = engines.fresh(
            arch,
            checkpoint=checkpoint,
            rbln={"cache_root": str(tmp_path)},
            max_model_len=512,
            **DEVIATIONS.get(arch, {}),
        )
        alone = [engine.generate([prompt], params)[0] for prompt in prompts]
        together = engine.generate(prompts, params)
        missed = engine.total("rbln_compile_cache_requests_total", result="miss")
        engine.llm.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        tolerance = TOLERANCES.get(arch, 1e-3)
        assert_equal(alone, expected, tolerance)
        assert_equal(together, expected, tolerance)
        assert bool(missed) is misses


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
