"""Mixtures of experts: tokens of transformers on every path, whatever company a row has."""

import json
from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEFactory

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.settings import configured
from tests.checkpoint_families import LAYERS, MIXTURES
from tests.engine.conftest import Engine, Engines
from tests.engine.support import FEW, GREEDY, NUM_TOKENS, assert_equals_reference, make_prompts
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

PATHS: dict[str, dict[str, bool]] = {
    "opt": {},
    "custom": {"moe_use_opt_kernel": False},
    "native": {"moe_use_opt_kernel": False, "moe_custom_kernel": False},
}
# Weights that sum to one; that do not, with a shared expert; groups, biases and factors.
BY_DEFAULT = [("mixtral", "opt"), ("qwen2_moe", "custom"), ("qwen3_moe", "native")]
PROMPT_LENGTHS = [1, 2, 17, 64, 65, 130, 223]
PROMPTS = make_prompts(PROMPT_LENGTHS, seed=50)


def engine_on(engines: Engines, arch: str, path: str, **rbln: Any) -> Engine:
    return engines(arch, rbln={**FEW, **PATHS[path], **rbln})


def assert_alone_and_together(engine: Engine) -> None:
    alone = [engine.generate([prompt], GREEDY)[0] for prompt in PROMPTS]
    assert_equals_reference(engine, PROMPTS, alone)
    together = engine.generate(PROMPTS, GREEDY)
    assert_equals_reference(engine, PROMPTS, together)
    # Three requests in a bucket of four, chunks that end in padding: not a bit of them shows.
    for one, other in zip(alone, together, strict=True):
        assert _logprobs(one) == _logprobs(other)


def _logprobs(output: Any) -> list[dict[int, float]]:
    steps = output.outputs[0].logprobs
    return [{token: entry.logprob for token, entry in step.items()} for step in steps]


@pytest.mark.parametrize(("arch", "path"), BY_DEFAULT)
def test_tokens_equal_the_reference(engines: Engines, arch: str, path: str) -> None:
    assert_alone_and_together(engine_on(engines, arch, path))


@pytest.mark.wide
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("arch", MIXTURES)
def test_every_family_on_every_path(engines: Engines, arch: str, path: str) -> None:
    # vLLM wraps the classes of transformers that it runs itself (Dots1): they go first.
    for prompt in PROMPTS:
        reference_generate(engines.checkpoints(arch), prompt, NUM_TOKENS)
    assert_alone_and_together(engine_on(engines, arch, path))


def test_routing_in_groups_by_biased_scores(engines: Engines) -> None:
    engine = engines("glm4_moe", rbln=FEW)
    prompts = make_prompts([17, 65, 130], seed=52)
    assert_equals_reference(engine, prompts, engine.generate(prompts, GREEDY))


@pytest.mark.wide
@pytest.mark.parametrize("path", PATHS)
def test_without_native_kernels(engines: Engines, path: str) -> None:
    engine = engine_on(engines, "qwen2_moe", path, kernels="aten")
    # They compute padding. Three of eight experts are chosen: twice the weights for a product.
    assert configured(engine.core.vllm_config).prefill_step_tokens == 32
    prompts = make_prompts(PROMPT_LENGTHS, seed=51)
    assert_equals_reference(engine, prompts, engine.generate(prompts, GREEDY))


@pytest.mark.wide
@pytest.mark.parametrize("path", PATHS)
def test_the_tokens_mask_changes_no_token(engines: Engines, path: str) -> None:
    engine = engine_on(engines, "qwen3_moe", path, use_moe_tokens_mask=False)
    prompts = make_prompts([3, 70, 130], seed=53)
    assert_equals_reference(engine, prompts, engine.generate(prompts, GREEDY))


def test_the_path_is_in_the_description(engines: Engines) -> None:
    engine = engine_on(engines, "qwen2_moe", "custom")
    experts = json.loads((engine.run_dir / "describe-0.json").read_text())["experts"]
    assert experts == {
        "path": "custom",
        "reason": "VLLM_RBLN_MOE_CUSTOM_KERNEL is on and VLLM_RBLN_MOE_USE_OPT_KERNEL off",
        "tokens_mask": True,
        "layers": LAYERS,
        "experts": 8,
        "local": 8,
        "ranks": 1,
    }


ROUTING, ACTIVATION = "expert routing by token ids, to", "experts with another activation"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"activation": "gelu"}, ACTIVATION),
        ({"swiglu_limit": 7.0}, ACTIVATION),
        ({"top_k": 2, "apply_router_weight_on_input": True}, ROUTING),
        ({"zero_expert_type": "identity", "e_score_correction_bias": torch.zeros(4)}, ROUTING),
    ],
)
def test_a_layer_that_asks_for_more_is_refused_when_it_is_made(
    engines: Engines, options: dict[str, Any], text: str
) -> None:
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 32, "intermediate_size": 16}
    # An engine of this process has set up what vLLM's layers need.
    with (
        set_current_vllm_config(engine_on(engines, "mixtral", "opt").core.vllm_config),
        pytest.raises(UnsupportedModelError, match=f"some.layer: {text}"),
    ):
        FusedMoEFactory(prefix="some.layer", **{**sizes, **options})


def test_another_exchange_of_tokens_is_refused(engines: Engines) -> None:
    from vllm.engine.arg_utils import EngineArgs

    checkpoint, options = str(engines.checkpoints("qwen3_moe")), {"data_parallel_size": 2}
    args = EngineArgs(checkpoint, all2all_backend="deepep_low_latency", **options)
    with pytest.raises(ValueError, match="another exchange of experts' tokens"):
        args.create_engine_config()
