"""Mixtures of experts: tokens of transformers, whatever company a row has; what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.fused_moe import FusedMoEFactory

from rbln_backend.errors import UnsupportedModelError
from tests.engine.conftest import Engines
from tests.engine.test_equality import GREEDY, assert_equals_reference, make_prompts

pytestmark = pytest.mark.engine

# Weights that sum to one, or (Qwen2 with its shared expert, OLMoE) do not.
ARCHITECTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "granitemoe"]
PROMPT_LENGTHS = [1, 2, 17, 64, 65, 130, 223]


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_tokens_equal_the_reference(engines: Engines, arch: str) -> None:
    engine = engines(arch)
    prompts = make_prompts(PROMPT_LENGTHS, seed=50)
    alone = [engine.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert_equals_reference(engine, prompts, alone)
    assert_equals_reference(engine, prompts, engine.generate(prompts, GREEDY))


def test_without_native_kernels(engines: Engines) -> None:
    engine = engines("qwen2_moe", rbln={"kernels": "aten"})
    prompts = make_prompts(PROMPT_LENGTHS, seed=51)
    assert_equals_reference(engine, prompts, engine.generate(prompts, GREEDY))


def test_expert_parallelism_is_refused(engines: Engines) -> None:
    with pytest.raises(ValueError, match="expert parallelism: not supported"):
        engines.fresh("mixtral", enable_expert_parallel=True)


def test_routing_of_another_kind_is_refused_before_weights_are_read(engines: Engines) -> None:
    with pytest.raises(ValueError, match=r"layers\.0.*expert routing .* top-k softmax"):
        engines.fresh(
            "mixtral",
            hf_overrides={
                "architectures": ["PhiMoEForCausalLM"],
                "attention_bias": False,
                "lm_head_bias": False,
            },
            load_format="safetensors",
        )


ROUTING, ACTIVATION = "expert routing that is not", "experts with another activation"


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"activation": "gelu"}, ACTIVATION),
        ({"swiglu_limit": 7.0}, ACTIVATION),
        ({"scoring_func": "sigmoid"}, ROUTING),
        ({"use_grouped_topk": True, "num_expert_group": 2, "topk_group": 1}, ROUTING),
        ({"custom_routing_function": print}, ROUTING),
        ({"e_score_correction_bias": torch.zeros(4)}, ROUTING),
        ({"routed_scaling_factor": 2.0}, ROUTING),
        ({"top_k": 1, "apply_router_weight_on_input": True}, ROUTING),
    ],
)
def test_a_layer_that_asks_for_more_is_refused_when_it_is_made(
    engines: Engines, options: dict[str, Any], text: str
) -> None:
    sizes = {"num_experts": 4, "top_k": 2, "hidden_size": 32, "intermediate_size": 16}
    # An engine of this process has set up what vLLM's layers need.
    with (
        set_current_vllm_config(engines("mixtral").core.vllm_config),
        pytest.raises(UnsupportedModelError, match=f"some.layer: {text}"),
    ):
        FusedMoEFactory(prefix="some.layer", **{**sizes, **options})
