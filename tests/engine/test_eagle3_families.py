"""EAGLE-3 with served families other than Llama changes no token."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from rbln_backend.errors import UnsupportedModelError
from tests.eagle3_checkpoints import NARROW, fitted_eagle3, random_eagle3
from tests.engine.conftest import Engines
from tests.engine.support import MOST, AnyLength, make_prompts
from tests.engine.test_draft_models import GREEDY, PROMPTS, Drafted, start
from tests.engine.test_speculation import greedy, results, seeded
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint

pytestmark = pytest.mark.engine


FEWER = {
    "prefill_chunk_buckets": [64],
    "decode_batch_bucket_strategy": "manual",
    "decode_batch_bucket_manual_buckets": [4],
    "verify_lengths": [MOST + 1],
}
FP8 = Recipe(format="fp8", block=(64, 64))
OFTEN, SELDOM = ("qwen3", "minimax_m2"), ("qwen2", "qwen3_moe", "mistral_full", "gpt_oss")


@pytest.mark.parametrize(
    "arch", [*OFTEN, *(pytest.param(arch, marks=pytest.mark.wide) for arch in SELDOM)]
)
def test_right_drafts_save_steps_and_change_nothing(
    engines: Engines, tmp_path: Path, arch: str
) -> None:
    plain = engines(arch)
    answers = results(plain, PROMPTS, GREEDY)
    texts = [prompt + list(answer[0]) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    own = fitted_eagle3(tmp_path, plain.checkpoint, texts, last=41)
    drafted = Drafted(plain, start(engines, own, "eagle3", arch=arch, rbln=FEWER), "eagle3")
    drafted.check(AnyLength(MOST + 1))
    drafted.run(PROMPTS, GREEDY)
    assert drafted.share() > 0.6
    drafted.check(AnyLength())
    prompts = make_prompts([100, 101, 102, 103], seed=41)
    drafted.run(prompts, [greedy(), seeded(1), seeded(2, frequency_penalty=0.3), greedy()])


@pytest.mark.parametrize(
    ("arch", "recipe", "cache", "share"),
    [
        ("minimax_m2", FP8, "auto", 0.6),
        # The layer is fitted to states over keys and values that are not rounded.
        pytest.param("minimax_m2", FP8, "fp8", 0.3, marks=pytest.mark.wide),
        pytest.param("llama", Recipe(bits=4, group_size=64), "auto", 0.6, marks=pytest.mark.wide),
    ],
)
def test_quantised_models_answer_the_same(
    engines: Engines, tmp_path: Path, arch: str, recipe: Recipe, cache: str, share: float
) -> None:
    """The layer is not quantised; its cache is of the served model's dtype."""
    served = make_quantized_checkpoint(arch, tmp_path / "served", recipe, intermediate_size=128)
    plain = engines.fresh(arch, checkpoint=served, kv_cache_dtype=cache)
    answers = results(plain, PROMPTS, GREEDY)
    texts = [prompt + list(answer[0]) for prompt, answer in zip(PROMPTS, answers, strict=True)]
    own = fitted_eagle3(tmp_path / "own", served / "plain", texts, last=41)
    options = {"checkpoint": served, "kv_cache_dtype": cache, "rbln": FEWER}
    drafted = Drafted(plain, start(engines, own, "eagle3", arch=arch, **options), "eagle3")
    drafted.check(AnyLength(MOST + 1))
    drafted.run(PROMPTS, GREEDY)
    assert drafted.share() > share
    drafted.run(PROMPTS[:3], [greedy(), seeded(1), seeded(2)])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
            r"eagle_aux_hidden_state_layer_ids must be 3 layers from 0 to 3, got \[1, 2, 4\]",
        ),
        ({"target_hidden_size": 64}, "hidden_size must be the served model's, 128, got 64"),
        (
            {"lost": "lm_head"},
            r"lm_head\.weight must be in the checkpoint",
        ),
        ({**NARROW, "lost": "embed_tokens"}, r"embed_tokens\.weight must be in the"),
    ],
)
def test_layers_that_do_not_fit_are_refused(
    engines: Engines, tmp_path: Path, fields: dict[str, Any], text: str
) -> None:
    served, lost = engines.checkpoints("llama"), fields.get("lost")
    own = random_eagle3(tmp_path, served, **{n: v for n, v in fields.items() if n != "lost"})
    if lost is not None:
        weights = load_file(own / "model.safetensors")
        kept = {name: tensor for name, tensor in weights.items() if lost not in name}
        save_file(kept, own / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=text):
        start(engines, own, "eagle3")
