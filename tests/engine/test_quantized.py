"""Quantised checkpoints give the tokens of transformers over the weights that they stand for."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm import SamplingParams

from tests.adapters import EVERY_LINEAR, HEAD, assert_worth_merged_weights, make_adapter, merge
from tests.checkpoint_families import FULL, SLIDING
from tests.checkpoints import CheckpointCache
from tests.engine.conftest import Engine, Engines
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.engine.support import FEW, assert_equals_reference, make_prompts
from tests.quantized_checkpoints import CHANNEL, Recipe, make_quantized_checkpoint
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

PROMPT_LENGTHS, NUM_TOKENS = [1, 17, 64, 130], 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
W4 = Recipe(bits=4, group_size=64)
FP8_BLOCKS = Recipe(format="fp8", block=(128, 128))
# The sizes that blocks want; the last block of 192 inputs is cut.
BLOCKS = {"hidden_size": 192, "num_key_value_heads": 4}
FP8_CHANNEL = Recipe(format="float-quantized")
INT8_STATIC = Recipe(format="int-quantized", block=(0, 0), static=True)
AWQ = Recipe(format="awq", group_size=64)
W8 = Recipe(bits=8, group_size=CHANNEL)
MIXED = Recipe(others=(("down_proj", FP8_CHANNEL), ("o_proj", W8)))
BYTE_FORMATS = ("fp8", "float-quantized", "int-quantized")
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
EXPERT = TENSOR | {"enable_expert_parallel": True}
PIPELINE: dict[str, Any] = {"pipeline_parallel_size": 2}
Make = Callable[..., Path]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    made: dict[str, Path] = {}

    def checkpoint(arch: str, recipe: Recipe, **overrides: Any) -> Path:
        key = repr((arch, recipe, overrides))
        if key not in made:
            path = tmp_path_factory.mktemp("quantized")
            made[key] = make_quantized_checkpoint(arch, path, recipe, **overrides)
        return made[key]

    return checkpoint


def assert_equals_plain(engine: Engine, checkpoint: Path, seed: int) -> None:
    prompts = make_prompts(PROMPT_LENGTHS, seed=seed)
    outputs = engine.generate(prompts, GREEDY)
    assert_equals_reference(engine, prompts, outputs, NUM_TOKENS, checkpoint / "plain")
    # Alone, and after a prefix that is there already.
    again, (alone,) = outputs[-1], engine.generate(prompts[-1:], GREEDY)
    assert alone.num_cached_tokens > 0
    assert alone.outputs[0].token_ids == again.outputs[0].token_ids


def assert_holds_nothing_else(engine: Engine, recipe: Recipe) -> None:
    """Packed words, scales and zero points are all that is left of a layer's weights."""
    worker = engine.core.model_executor.driver_worker.worker
    layer = worker.get_model().model.layers[0].mlp.down_proj
    columns, depth = layer.output_size, layer.input_size
    groups = 1 if recipe.group_size == CHANNEL else depth // recipe.group_size
    if recipe.format in BYTE_FORMATS:
        groups = depth // recipe.block[1] if recipe.block[1] else 1
    words, scales = columns * depth * recipe.bits // 8, columns * groups * 4
    zeros = columns * groups if recipe.format == "awq" or not recipe.symmetric else 0
    held = [*layer.parameters(), *layer.buffers()]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == words + scales + zeros


def wide(*cases: Any) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.wide) for case in cases]


@pytest.mark.parametrize(
    ("arch", "recipe"),
    [
        ("llama", Recipe(bits=4, group_size=64, head_bits=8)),
        ("qwen3", Recipe(format="gptq", bits=4, group_size=128)),
        ("llama", FP8_BLOCKS),
        ("qwen2", INT8_STATIC),
        ("llama", AWQ),
        *wide(
            ("llama", FP8_CHANNEL),
            ("qwen3", Recipe(format="fp8", block=(0, 0), static=True)),
            ("phi3", Recipe(format="fp8", block=(0, 0))),
            ("llama", Recipe(format="float-quantized", block=(64, 64))),
            ("qwen3", Recipe(format="float-quantized", block=(0, 0), static=True)),
            ("llama", Recipe(format="int-quantized")),
            ("qwen2", Recipe(format="awq", group_size=128, skipped=("self_attn",))),
            ("qwen3", Recipe(bits=4, group_size=128, symmetric=False)),
            ("llama", Recipe(bits=8, group_size=CHANNEL, symmetric=False)),
            ("llama", Recipe(others=(("down_proj", FP8_CHANNEL), ("o_proj", W8)))),
            ("llama", Recipe(bits=8, group_size=CHANNEL, head_bits=8)),
            ("qwen3", Recipe(bits=4, group_size=128, head_bits=8)),
            ("llama", Recipe(bits=8, group_size=64)),
            ("qwen2", Recipe(bits=4, group_size=CHANNEL)),
            ("llama", Recipe(format="gptq", bits=8, group_size=CHANNEL, head_bits=8)),
            ("gemma3_text", Recipe(format="gptq", bits=8, group_size=64)),
            ("phi3", Recipe(format="gptq", bits=4, group_size=64)),
        ),
    ],
)
def test_tokens_equal_those_of_the_plain_weights(
    engines: Engines, make: Make, arch: str, recipe: Recipe
) -> None:
    checkpoint = make(arch, recipe, **(BLOCKS if recipe == FP8_BLOCKS else {}))
    engine = engines.fresh(checkpoint=checkpoint, rbln=FEW)
    assert_equals_plain(engine, checkpoint, seed=70)
    assert_holds_nothing_else(engine, recipe.of("down_proj.weight"))


SIZES: dict[str, dict[str, Any]] = {
    # Whole blocks of 64 for each of two ranks.
    "llama": {"num_key_value_heads": 4},
    "qwen2_moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {"moe_intermediate_size": 128},
    # The time of a capture is that of the layers.
    "gpt_oss": {
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL],
    },
}
NVFP4 = Recipe(format="nvfp4", group_size=16, skipped=("self_attn", "mlp.gate"))
NATIVE = {"moe_use_opt_kernel": False, "moe_custom_kernel": False}


@pytest.mark.parametrize(
    ("arch", "recipe", "rbln"),
    [
        ("qwen3_moe", MIXED, {}),
        ("gpt_oss", Recipe(format="mxfp4"), {}),
        ("qwen3_moe", NVFP4, {}),
        ("qwen3_moe", Recipe(format="gptq", bits=4, group_size=128), {}),
        *wide(
            ("qwen3_moe", NVFP4, NATIVE),
            ("qwen3_moe", NVFP4, {"kernels": "aten"}),
            ("qwen3_moe", W4, {}),
            ("qwen3_moe", Recipe(format="fp8", block=(64, 64), skipped=("mlp.gate",)), {}),
            ("qwen2_moe", Recipe(format="fp8", block=(0, 0), static=True), {}),
            ("qwen3_moe", FP8_CHANNEL, {"kernels": "aten"}),
            ("mixtral", Recipe(format="int-quantized"), {"moe_use_opt_kernel": False}),
            ("qwen3_moe", AWQ, NATIVE),
            ("qwen3_moe", Recipe(symmetric=False), {"kernels": "aten"}),
            ("gpt_oss", Recipe(format="mxfp4"), NATIVE),
            ("gpt_oss", Recipe(format="mxfp4"), {"kernels": "aten"}),
            ("mixtral", Recipe(format="gptq", bits=8, group_size=CHANNEL), NATIVE),
            ("mixtral", Recipe(bits=8, group_size=CHANNEL), {"moe_use_opt_kernel": False}),
            ("qwen2_moe", W4, NATIVE),
            ("mixtral", W4, {"kernels": "aten"}),
        ),
    ],
)
def test_experts_equal_those_of_the_plain_weights(
    engines: Engines, make: Make, arch: str, recipe: Recipe, rbln: dict[str, Any]
) -> None:
    checkpoint = make(arch, recipe, **SIZES.get(arch, {}))
    engine = engines.fresh(checkpoint=checkpoint, rbln=FEW | rbln)
    assert_equals_plain(engine, checkpoint, seed=71)


@pytest.mark.wide
@pytest.mark.parametrize(
    ("arch", "recipe", "experts"),
    [
        ("llama", W4, "no"),
        ("llama", Recipe(format="gptq", bits=8, group_size=CHANNEL), "no"),
        ("llama", FP8_CHANNEL, "no"),
        ("llama", AWQ, "no"),
        ("qwen3_moe", W4, "single"),
        ("gpt_oss", Recipe(format="mxfp4"), "stacked"),
    ],
    ids=str,
)
def test_an_adapter_over_quantised_weights_is_worth_its_merged_ones(
    engines: Engines, make: Make, tmp_path: Path, arch: str, recipe: Recipe, experts: Any
) -> None:
    checkpoint = make(arch, recipe, **SIZES.get(arch, {}))
    plain = checkpoint / "plain"
    targets = (*EVERY_LINEAR, *HEAD)
    adapter = make_adapter(
        plain, tmp_path / "adapter", seed=3, rank=8, targets=targets, experts=experts
    )
    merged = merge(checkpoint / "plain", adapter, tmp_path / "merged")
    engine = engines.fresh(checkpoint=checkpoint, enable_lora=True, max_loras=1, max_lora_rank=8)
    prompts = make_prompts(PROMPT_LENGTHS, seed=72)
    assert_worth_merged_weights(engine.llm, adapter, merged, prompts, GREEDY)


@pytest.mark.wide
@pytest.mark.parametrize("options", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
@pytest.mark.parametrize(
    ("arch", "recipe"),
    [
        ("llama", W4),
        ("llama", Recipe(format="gptq", bits=8, group_size=CHANNEL)),
        ("qwen3_moe", W4),
        ("llama", Recipe(format="fp8", block=(64, 64))),
        ("llama", Recipe(format="fp8", block=(0, 0), static=True)),
        ("qwen2", AWQ),
        ("qwen3_moe", FP8_CHANNEL),
        ("qwen3_moe", AWQ),
        ("gpt_oss", Recipe(format="mxfp4")),
        ("qwen3_moe", NVFP4),
    ],
    ids=str,
)
def test_ranks_share_packed_weights(
    engines: Engines, make: Make, tmp_path: Path, arch: str, recipe: Recipe, options: dict[str, Any]
) -> None:
    engine = engines.fresh(checkpoint=make(arch, recipe, **SIZES.get(arch, {})))
    prompts = make_prompts(PROMPT_LENGTHS, seed=73)
    answers = run_ranks(engine.checkpoint, tmp_path, prompts, **options)
    assert_as_one_rank(engine, prompts, answers, 1e-4)


@pytest.mark.wide
@pytest.mark.parametrize("group", [16, 32])
def test_ranks_divide_nvfp4_experts(
    engines: Engines, make: Make, tmp_path: Path, group: int
) -> None:
    recipe = replace(NVFP4, group_size=group)
    engine = engines.fresh(checkpoint=make("qwen3_moe", recipe, **SIZES["qwen3_moe"]))
    prompts = make_prompts(PROMPT_LENGTHS, seed=73)
    answers = run_ranks(engine.checkpoint, tmp_path, prompts, **EXPERT)
    assert_as_one_rank(engine, prompts, answers, 1e-4)


# --------------------------------------------------------------------------------------- e4m3 cache
LENGTHS, E4M3_TOKENS = [1, 17, 64, 130], 24
E4M3_GREEDY = SamplingParams(temperature=0.0, max_tokens=E4M3_TOKENS, ignore_eos=True, logprobs=1)
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
    outputs = engine.generate(prompts, E4M3_GREEDY)
    return [(list(output.outputs[0].token_ids), logprobs_of(output)) for output in outputs]


WIDE = [pytest.param(x, marks=pytest.mark.wide) for x in ("mistral", "phi3", "gemma3n_text")]


@pytest.mark.parametrize("arch", ["llama", "gemma3_text", *WIDE])
def test_tokens_are_those_of_rounded_keys_and_values(
    engines: Engines, checkpoints: CheckpointCache, arch: str
) -> None:
    checkpoint, prompts = checkpoints(arch), make_prompts(LENGTHS, seed=90)
    engine = engines.fresh(arch, **E4M3, rbln=FEW)
    together = answers_of(engine, prompts)
    assert_equals_rounded(together, prompts, checkpoint, unscaled(checkpoint))
    assert {cache.dtype for cache in engine.kv_caches()} == {torch.float8_e4m3fn}
    for prompt, among_others in zip(prompts, together, strict=True):
        # Alone, and after a prefix that is there already.
        (alone,) = engine.generate([prompt], E4M3_GREEDY)
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
    engine = engines.fresh(checkpoint=with_scales(checkpoint, scales), **options, rbln=FEW)
    prompts = make_prompts(LENGTHS, seed=91)
    assert_equals_rounded(answers_of(engine, prompts), prompts, checkpoint / "plain", scales)
    assert {cache.dtype for cache in engine.kv_caches()} == {torch.float8_e4m3fn}


def test_a_token_takes_half_the_bytes_of_bfloat16(engines: Engines) -> None:
    memory: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_memory_bytes": 1 << 20}
    memory["rbln"] = {"enable_warm_up": False}
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
