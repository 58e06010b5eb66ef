"""The text of multimodal checkpoints: tokens equal those of transformers' multimodal classes."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest

from tests.adapters import make_adapter, merge
from tests.checkpoints import make_checkpoint
from tests.engine.conftest import Engines
from tests.engine.test_equality import make_prompts
from tests.multimodal_checkpoints import (
    CONFIGS,
    enclose_gemma3n,
    make_multimodal_checkpoint,
    name_as_in_memory,
)
from tests.reference import reference_generate

pytestmark = pytest.mark.engine

USUAL = ("gemma3", "qwen2_5_vl")
MEMBERS = [
    pytest.param(name, marks=[] if name in USUAL else [pytest.mark.wide]) for name in CONFIGS
]
PROMPT_LENGTHS, NUM_TOKENS = [1, 17, 64, 130], 24
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
TEXT = {"disable_mm": True}


def assert_equals_transformers(
    engines: Engines, checkpoint: Path, reference_of: Path | None = None
) -> None:
    engine = engines.fresh(checkpoint=checkpoint, rbln=TEXT)
    prompts = make_prompts(PROMPT_LENGTHS, seed=7)
    for prompt, output in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        reference = reference_generate(reference_of or checkpoint, prompt, NUM_TOKENS)
        (completion,) = output.outputs
        assert list(completion.token_ids) == reference.token_ids, f"prompt of {len(prompt)}"
        for position, entries in enumerate(completion.logprobs):
            for token, entry in entries.items():
                wanted = float(reference.logprobs[position, token])
                assert entry.logprob == pytest.approx(wanted, abs=1e-3)
    weights = dict(engine.core.model_executor.driver_worker.worker.get_model().named_parameters())
    assert [name for name in weights if "vision" in name or "visual" in name] == []


@pytest.mark.parametrize("model_type", MEMBERS)
def test_tokens_are_transformers_own(model_type: str, engines: Engines, tmp_path: Path) -> None:
    assert_equals_transformers(engines, make_multimodal_checkpoint(model_type, tmp_path))


@pytest.mark.wide
def test_gemma3n_is_its_text_model(engines: Engines, tmp_path: Path) -> None:
    text = make_checkpoint("gemma3n_text", tmp_path / "text")
    assert_equals_transformers(engines, enclose_gemma3n(text, tmp_path / "whole"), text)


@pytest.mark.wide
@pytest.mark.parametrize("model_type", ["gemma3", "mistral3", "qwen2_vl"])
def test_weights_may_have_their_names_of_today(
    model_type: str, engines: Engines, tmp_path: Path
) -> None:
    checkpoint = make_multimodal_checkpoint(model_type, tmp_path)
    name_as_in_memory(checkpoint)
    assert_equals_transformers(engines, checkpoint)


@pytest.mark.wide
def test_adapters_name_the_layers_as_transformers_has_them(
    engines: Engines, tmp_path: Path
) -> None:
    checkpoint = make_multimodal_checkpoint("gemma3", tmp_path / "gemma3")
    name_as_in_memory(checkpoint)
    # The vision tower has none of these.
    adapter = make_adapter(checkpoint, tmp_path / "adapter", targets=("o_proj", "down_proj"))
    merged = merge(checkpoint, adapter, tmp_path / "merged")
    engine = engines.fresh(checkpoint=checkpoint, rbln=TEXT, enable_lora=True)
    prompts = make_prompts(PROMPT_LENGTHS, seed=8)
    outputs = engine.llm.generate(
        [{"prompt_token_ids": prompt} for prompt in prompts],
        GREEDY,
        lora_request=LoRARequest("a", 1, str(adapter)),
        use_tqdm=False,
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        reference = reference_generate(merged, prompt, NUM_TOKENS)
        assert list(output.outputs[0].token_ids) == reference.token_ids
        assert reference.token_ids != reference_generate(checkpoint, prompt, NUM_TOKENS).token_ids


def test_text_models_need_the_option(engines: Engines, tmp_path: Path) -> None:
    checkpoint = make_multimodal_checkpoint("gemma3", tmp_path)
    with pytest.raises(ValueError, match=r"multimodal inputs: .*--language-model-only"):
        engines.fresh(checkpoint=checkpoint)
