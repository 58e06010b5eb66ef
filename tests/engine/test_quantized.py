"""Quantised checkpoints give the tokens of transformers over the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams

from tests.adapters import EVERY_LINEAR, HEAD, assert_worth_merged_weights, make_adapter, merge
from tests.engine.conftest import Engine, Engines
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.engine.test_equality import make_prompts
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint
from tests.quantized_tensors import CHANNEL
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
    for prompt, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        reference = reference_generate(checkpoint / "plain", prompt, NUM_TOKENS)
        (completion,) = output.outputs
        assert list(completion.token_ids) == reference.token_ids, f"prompt of {len(prompt)}"
        for position, entries in enumerate(completion.logprobs):
            for token, entry in entries.items():
                wanted = float(reference.logprobs[position, token])
                assert entry.logprob == pytest.approx(wanted, abs=1e-3)
    # Alone, and after a prefix that is there already.
    again, (alone,) = output, engine.generate(prompts[-1:], GREEDY)
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
    engine = engines.fresh(checkpoint=checkpoint)
    assert_equals_plain(engine, checkpoint, seed=70)
    assert_holds_nothing_else(engine, recipe.of("down_proj.weight"))


SIZES = {
    # Whole blocks of 64 for each of two ranks.
    "llama": {"num_key_value_heads": 4},
    "qwen2_moe": {"moe_intermediate_size": 128, "shared_expert_intermediate_size": 128},
    "qwen3_moe": {"moe_intermediate_size": 128},
    "gpt_oss": {"intermediate_size": 64},
}
NVFP4 = Recipe(format="nvfp4", group_size=16, skipped=("self_attn", "mlp.gate"))
NATIVE = {"moe_use_opt_kernel": False, "moe_custom_kernel": False}


@pytest.mark.parametrize(
    ("arch", "recipe", "rbln"),
    [
        ("qwen3_moe", MIXED, {}),
        ("gpt_oss", Recipe(format="mxfp4"), {}),
        ("qwen3_moe", NVFP4, {}),
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
            ("qwen3_moe", Recipe(format="gptq", bits=4, group_size=128), {}),
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
    engine = engines.fresh(checkpoint=checkpoint, rbln=rbln)
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
    engines: Engines,
    make: Make,
    tmp_path: Path,
    arch: str,
    recipe: Recipe,
    options: dict[str, Any],
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
