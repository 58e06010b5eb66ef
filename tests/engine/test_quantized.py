"""Quantised checkpoints give the tokens of transformers over the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.adapters import make_adapter, merge
from tests.engine.conftest import Engine, Engines
from tests.engine.parallel_runs import assert_as_one_rank, run_ranks
from tests.engine.test_equality import make_prompts
from tests.quantized_checkpoints import CHANNEL, Recipe, make_quantized_checkpoint
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

PROMPT_LENGTHS, NUM_TOKENS = [1, 17, 64, 130], 32
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
W4 = Recipe(bits=4, group_size=64)
TENSOR: dict[str, Any] = {"tensor_parallel_size": 2}
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


def assert_holds_nothing_else(engine: Engine, recipe: Recipe) -> None:
    """The packed words and their scales are all that is left of a layer's weights."""
    worker = engine.core.model_executor.driver_worker.worker
    layer = worker.get_model().model.layers[0].mlp.down_proj
    columns, depth = layer.output_size, layer.input_size
    groups = 1 if recipe.group_size == CHANNEL else depth // recipe.group_size
    words, scales = columns * depth * recipe.bits // 8, columns * groups * 4
    held = [*layer.parameters(), *layer.buffers()]
    assert sum(tensor.untyped_storage().nbytes() for tensor in held) == words + scales


def wide(*cases: Any) -> list[Any]:
    return [pytest.param(*case, marks=pytest.mark.wide) for case in cases]


@pytest.mark.parametrize(
    ("arch", "recipe"),
    [
        ("llama", Recipe(bits=4, group_size=64, head_bits=8)),
        ("qwen3", Recipe(format="gptq", bits=4, group_size=128)),
        *wide(
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
    checkpoint = make(arch, recipe)
    engine = engines.fresh(checkpoint=checkpoint)
    assert_equals_plain(engine, checkpoint, seed=70)
    assert_holds_nothing_else(engine, recipe)


NATIVE = {"moe_use_opt_kernel": False, "moe_custom_kernel": False}


@pytest.mark.parametrize(
    ("arch", "recipe", "rbln"),
    [
        ("qwen3_moe", W4, {}),
        *wide(
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
    sizes = {} if arch == "mixtral" else {"moe_intermediate_size": 128}
    if arch == "qwen2_moe":
        sizes["shared_expert_intermediate_size"] = 128
    checkpoint = make(arch, recipe, **sizes)
    engine = engines.fresh(checkpoint=checkpoint, rbln=rbln)
    assert_equals_plain(engine, checkpoint, seed=71)


@pytest.mark.wide
@pytest.mark.parametrize("recipe", [W4, Recipe(format="gptq", bits=8, group_size=CHANNEL)], ids=str)
def test_an_adapter_over_quantised_weights_is_worth_its_merged_ones(
    engines: Engines, make: Make, tmp_path: Path, recipe: Recipe
) -> None:
    checkpoint = make("llama", recipe)
    adapter = make_adapter(checkpoint / "plain", tmp_path / "adapter", seed=3, rank=8)
    merged = merge(checkpoint / "plain", adapter, tmp_path / "merged")
    engine = engines.fresh(checkpoint=checkpoint, enable_lora=True, max_loras=1, max_lora_rank=8)
    prompts = make_prompts(PROMPT_LENGTHS, seed=72)
    outputs = engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        GREEDY,
        use_tqdm=False,
        lora_request=LoRARequest("adapter", 1, str(adapter)),
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = reference_generate(merged, prompt, NUM_TOKENS).token_ids
        assert list(output.outputs[0].token_ids) == expected


@pytest.mark.wide
@pytest.mark.parametrize("options", [TENSOR, PIPELINE], ids=["tensor", "pipeline"])
@pytest.mark.parametrize(
    ("arch", "recipe"),
    [
        ("llama", W4),
        ("llama", Recipe(format="gptq", bits=8, group_size=CHANNEL)),
        ("qwen3_moe", W4),
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
    sizes = {} if arch == "llama" else {"moe_intermediate_size": 128}
    engine = engines.fresh(checkpoint=make(arch, recipe, **sizes))
    prompts = make_prompts(PROMPT_LENGTHS, seed=73)
    answers = run_ranks(engine.checkpoint, tmp_path, prompts, **options)
    assert_as_one_rank(engine, prompts, answers, 1e-4)
