"""A KV cache of e4m3 gives the tokens of transformers over keys and values that are rounded so."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.checkpoints import CheckpointCache
from tests.engine.conftest import Engine, Engines
from tests.engine.parallel_runs import run_ranks
from tests.engine.test_equality import make_prompts
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

LENGTHS, NUM_TOKENS = [1, 17, 64, 130], 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=1)
E4M3 = {"kv_cache_dtype": "fp8"}
Scales = tuple[tuple[float, float], ...]
# Sums of the engine's order can end on the other side of a rounding, which moves one number of a
# key by an eighth at most: rare, and seen in few tokens.
MEAN, LARGEST = 0.01, 0.1


def unscaled(checkpoint: Path) -> Scales:
    config = json.loads((checkpoint / "config.json").read_text())
    return ((1.0, 1.0),) * int(config["num_hidden_layers"])


def logprobs_of(output: Any) -> list[float]:
    (completion,) = output.outputs
    return [
        entry[token].logprob
        for token, entry in zip(completion.token_ids, completion.logprobs, strict=True)
    ]


def assert_equals_rounded(
    answers: list[tuple[list[int], list[float]]],
    prompts: list[list[int]],
    plain: Path,
    scales: Scales,
) -> None:
    """Tokens, with their log-probabilities, wherever the reference is sure of them."""
    unlike_unrounded = 0.0
    for prompt, (found, logprobs) in zip(prompts, answers, strict=True):
        wanted = reference_generate(plain, prompt, len(found), cache_scales=scales)
        unrounded = reference_generate(plain, prompt, len(found))
        unsure = [i for i, margin in enumerate(wanted.margins) if margin < LARGEST]
        end = len(found) if found == wanted.token_ids else (unsure or [len(found)])[0]
        assert found[:end] == wanted.token_ids[:end], f"prompt of {len(prompt)}"
        pairs = zip(logprobs[:end], wanted.token_logprobs(), strict=False)
        errors = [abs(ours - theirs) for ours, theirs in pairs]
        assert sum(errors) <= MEAN * len(errors)
        assert max(errors, default=0.0) <= LARGEST
        first = (wanted.logprobs[0] - unrounded.logprobs[0]).abs()
        unlike_unrounded = max(unlike_unrounded, float(first.mean()))
    # Otherwise nothing here would show whether the cache is rounded.
    assert unlike_unrounded > 2 * MEAN


def answers_of(engine: Engine, prompts: list[list[int]]) -> list[tuple[list[int], list[float]]]:
    outputs = engine.generate(prompts, GREEDY)
    return [(list(output.outputs[0].token_ids), logprobs_of(output)) for output in outputs]


WIDE = [pytest.param(x, marks=pytest.mark.wide) for x in ("mistral", "phi3", "gemma3n_text")]


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", *WIDE])
def test_tokens_are_those_of_rounded_keys_and_values(
    engines: Engines, checkpoints: CheckpointCache, arch: str
) -> None:
    checkpoint, prompts = checkpoints(arch), make_prompts(LENGTHS, seed=90)
    engine = engines.fresh(arch, **E4M3)
    together = answers_of(engine, prompts)
    assert_equals_rounded(together, prompts, checkpoint, unscaled(checkpoint))
    assert {cache.dtype for cache in engine.kv_caches()} == {torch.float8_e4m3fn}
    for prompt, among_others in zip(prompts, together, strict=True):
        # Alone, and after a prefix that is there already.
        (alone,) = engine.generate([prompt], GREEDY)
        assert (list(alone.outputs[0].token_ids), logprobs_of(alone)) == among_others
    assert alone.num_cached_tokens > 0


def with_scales(checkpoint: Path, scales: Scales) -> Path:
    """The checkpoint with scales for its cache, as FP8 checkpoints are published."""
    file = checkpoint / "model.safetensors"
    tensors = load_file(file)
    for layer, pair in enumerate(scales):
        for name, scale in zip("kv", pair, strict=True):
            tensors[f"model.layers.{layer}.self_attn.{name}_scale"] = torch.tensor(scale)
    save_file(tensors, file, {"format": "pt"})
    return checkpoint


SCHEME = {"type": "float", "num_bits": 8, "strategy": "tensor", "symmetric": True, "dynamic": False}


@pytest.mark.parametrize(
    ("recipe", "options"),
    [
        (Recipe(format="fp8", block=(0, 0)), E4M3),
        # The checkpoint asks for it.
        (Recipe(format="float-quantized", fields={"kv_cache_scheme": SCHEME}), {}),
    ],
    ids=["fp8", "compressed-tensors"],
)
def test_scales_are_the_checkpoints(
    engines: Engines, tmp_path: Path, recipe: Recipe, options: dict[str, Any]
) -> None:
    checkpoint = make_quantized_checkpoint("llama", tmp_path / "fp8", recipe)
    scales = tuple((0.013 * (n + 1), 0.4 / (n + 1)) for n in range(len(unscaled(checkpoint))))
    engine = engines.fresh(checkpoint=with_scales(checkpoint, scales), **options)
    prompts = make_prompts(LENGTHS, seed=91)
    assert_equals_rounded(answers_of(engine, prompts), prompts, checkpoint / "plain", scales)
    assert {cache.dtype for cache in engine.kv_caches()} == {torch.float8_e4m3fn}


def test_a_token_takes_half_the_bytes_of_bfloat16(engines: Engines) -> None:
    memory = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 20}
    whole = engines.fresh("llama", **memory)
    half = engines.fresh("llama", **memory, **E4M3)
    sizes = [engine.core.vllm_config.cache_config.num_gpu_blocks for engine in (whole, half)]
    assert sizes[1] == 2 * sizes[0]
    assert half.kv_caches()[0].nbytes == whole.kv_caches()[0].nbytes


@pytest.mark.wide
@pytest.mark.parametrize("options", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_keep_e4m3(
    checkpoints: CheckpointCache, tmp_path: Path, options: dict[str, Any]
) -> None:
    checkpoint, prompts = checkpoints("llama"), make_prompts(LENGTHS, seed=92)
    found = run_ranks(checkpoint, tmp_path, prompts, **options, **E4M3)
    answers = [(answer["tokens"], answer["logprobs"]) for answer in found]
    assert_equals_rounded(answers, prompts, checkpoint, unscaled(checkpoint))
