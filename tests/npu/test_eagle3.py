"""EAGLE-3 over the double: hidden states of three layers, and a vocabulary of its own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.eagle3_checkpoints import fitted_eagle3, random_eagle3
from tests.engine.test_quantized import with_scales
from tests.npu.engines import Job, Ran, run
from tests.npu.test_draft_models import (
    assert_cache_dtype,
    assert_fewer_runs,
    assert_same_from_stored_graphs,
    assert_same_with_seeds,
    assert_steps_saved,
    with_model,
)
from tests.npu.test_drafts import BATCHES, CONTEXT, LENGTH
from tests.npu.test_engines import YARN_OVER_LONG
from tests.npu.test_quantized import SCALES, amplify_attention
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("eagle3")


@pytest.fixture(scope="module")
def fitted(checkpoints: CheckpointCache, folder: Path) -> Job:
    return fitted_job(checkpoints, folder, "llama")


@pytest.fixture(scope="module")
def cold(fitted: Job, folder: Path) -> Ran:
    return run([fitted], folder)


def fitted_job(checkpoints: CheckpointCache, folder: Path, arch: str) -> Job:
    """Return a job of ``arch`` with a layer that is right."""
    # Its positions otherwise end before the context does.
    ropes = {"rope_parameters": YARN_OVER_LONG} if arch == "gpt_oss" else {}
    served = checkpoints(arch, max_position_embeddings=CONTEXT, **ropes)
    job = Job(served, {"max_model_len": CONTEXT}, BATCHES, LENGTH, checks_all_drafts=True)
    batch, answers = job.batches[0], job.expected()[0]
    texts = [prompt + answer for prompt, answer in zip(batch, answers, strict=True)]
    own = fitted_eagle3(folder / f"fitted-{arch}", served, texts, last=LENGTH + 1)
    return with_model(job, "eagle3", own)


def test_right_drafts_save_steps(fitted: Job, folder: Path, cold: Ran) -> None:
    """Random weights give the same answers in more steps."""
    own = random_eagle3(folder / "random", fitted.checkpoint)
    wrong = run([with_model(fitted, "eagle3", own)], folder)
    assert_steps_saved(fitted, cold, wrong)


@pytest.mark.wide
def test_answers_are_the_same_warm_and_over_a_bundle(
    fitted: Job, folder: Path, cold: Ran, tmp_path: Path
) -> None:
    assert_same_from_stored_graphs(fitted, folder, cold, tmp_path)


@pytest.mark.wide
def test_seeds_give_the_same_tokens(fitted: Job, folder: Path) -> None:
    assert_same_with_seeds(fitted, folder)


@pytest.mark.wide
@pytest.mark.parametrize("arch", ["qwen3", "minimax_m2", "gpt_oss"])
def test_other_families_answer_as_transformers(
    checkpoints: CheckpointCache, tmp_path: Path, arch: str
) -> None:
    job = fitted_job(checkpoints, tmp_path, arch)
    assert run([job], tmp_path).answers == [job.expected()]


@pytest.mark.wide
def test_rounded_keys_and_values_are_those_of_steps_without_drafts(tmp_path: Path) -> None:
    """With coarse scales of the checkpoint, and 1.0 for the layer's own cache."""
    recipe = Recipe(format="fp8", block=(32, 64))
    path = make_quantized_checkpoint(
        "llama", tmp_path / "fp8", recipe, max_position_embeddings=CONTEXT
    )
    amplify_attention(path)
    job = Job(
        with_scales(path, SCALES),
        {"max_model_len": CONTEXT, "kv_cache_dtype": "fp8"},
        BATCHES[:1],
        LENGTH,
        reference=path / "plain",
        checks_all_drafts=True,
        cache_scales=SCALES,
    )
    (answers,) = job.expected()
    assert answers != replace(job, cache_scales=()).expected()[0]
    texts = [prompt + answer for prompt, answer in zip(BATCHES[0], answers, strict=True)]
    options = {"last": LENGTH + 1, "cache_scales": SCALES}
    own = fitted_eagle3(tmp_path / "fitted", path / "plain", texts, **options)
    right = run([with_model(job, "eagle3", own)], tmp_path)
    assert_cache_dtype(right, "torch.float8_e4m3fn")
    random = random_eagle3(tmp_path / "random", path / "plain")
    assert_fewer_runs([[answers]], right, run([with_model(job, "eagle3", random)], tmp_path))
