"""MTP layers over the double: right drafts save steps, and neither kind changes a token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from rbln_backend.graphs.bundles import collect, write_folder
from server.commands.cache import GraphChecks
from tests.checkpoints import CheckpointCache
from tests.mtp_checkpoints import MTP_LAYERS, MtpMaker, quantized_maker
from tests.npu.engines import Job, Ran, run
from tests.npu.test_draft_models import (
    assert_cache_dtype,
    assert_fewer_runs,
    assert_steps_saved,
)
from tests.npu.test_drafts import CONTEXT, LENGTH, MOST, PROMPTS
from tests.npu.test_engines import IN_BLOCKS, SIZES
from tests.quantized_checkpoints import Recipe, quantization_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MTP = {"method": "mtp", "num_speculative_tokens": MOST}
BLOCKS = Recipe(format="fp8", block=(64, 64))
GLM_IN_BLOCKS = {"intermediate_size": 128, "moe_intermediate_size": 64}
WIDE = ("ernie4_5_moe", "mimo")
# So coarse that tokens depend on the rounding, and on which scale is whose; the MTP layer's last.
SCALES = ((4.0, 2.0), (2.0, 8.0), (8.0, 1.0), (16.0, 4.0))


@dataclass(frozen=True)
class MtpJobs:
    """Jobs of one family, and the run of the first."""

    plain: Job
    fitted: Job
    wrong: Job
    cold: Ran
    folder: Path


@pytest.fixture(
    scope="module",
    params=[pytest.param(n, marks=[pytest.mark.wide] * (n in WIDE)) for n in MTP_LAYERS],
)
def jobs(
    checkpoints: CheckpointCache,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> MtpJobs:
    name, folder = request.param, tmp_path_factory.mktemp("mtp")
    sizes = SIZES if name == "deepseek_v3" else {}
    maker = MtpMaker(name, checkpoints, **sizes | {"max_position_embeddings": CONTEXT})
    return jobs_of(maker, folder)


def jobs_of(
    maker: MtpMaker, folder: Path, ranks: Mapping[str, int] | None = None, **double: Any
) -> MtpJobs:
    """Return the jobs of ``maker``'s checkpoints, the first of which ``run`` has run.

    ``ranks``: options of its engine.
    """
    options = {"max_model_len": CONTEXT, **(ranks or {})}
    plain = Job(maker.stored, options, [PROMPTS], LENGTH, reference=maker.served)
    (answers,) = plain.expected()
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    fitted, wrong = (
        replace(
            plain,
            checkpoint=own,
            options=plain.options | {"speculative_config": MTP},
            checks_all_drafts=True,
        )
        for own in (
            maker.fitted(folder / "fitted", texts, last=LENGTH + 1),
            maker.random(folder / "random"),
        )
    )
    cold = run([fitted], folder / "npu", **double)
    return MtpJobs(plain, fitted, wrong, cold, folder)


def test_right_drafts_save_steps(jobs: MtpJobs) -> None:
    """Random weights give the same answers in more steps, from the stored graphs."""
    assert_steps_saved_by(jobs)


def assert_steps_saved_by(jobs: MtpJobs) -> None:
    """Assert equal answers of right drafts and of wrong ones, from one set of graphs."""
    wrong = run([jobs.wrong], jobs.folder / "npu")
    assert_steps_saved(jobs.fitted, jobs.cold, wrong)
    assert all(call["hit"] for call in wrong.calls("compile"))


@pytest.mark.wide
def test_warm_seeded_answers_over_a_bundle(jobs: MtpJobs) -> None:
    bundle = jobs.folder / "bundle"
    write_folder(bundle, collect(jobs.folder / "npu" / "cache", GraphChecks()))
    settings = {"cache_bundles": [str(bundle)]}
    seeded = [replace(job, seed=5) for job in (jobs.fitted, jobs.wrong)]
    drafted = run(seeded, jobs.folder / "host", rbln=settings)
    assert all(call["hit"] for call in drafted.calls("compile"))
    plain = run([replace(jobs.plain, seed=5)], jobs.folder / "plain")
    assert drafted.answers == plain.answers * 2 != jobs.cold.answers * 2


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "sizes"), [("deepseek_v3", IN_BLOCKS), ("glm4_moe", GLM_IN_BLOCKS)]
)
def test_layers_in_blocks_of_fp8_save_steps(
    tmp_path: Path, name: str, sizes: dict[str, int]
) -> None:
    fields = sizes | {"max_position_embeddings": CONTEXT}
    jobs = jobs_of(quantized_maker(name, tmp_path / "made", BLOCKS, **fields), tmp_path)
    assert_steps_saved_by(jobs)
    graphs = [{x["dtype"] for x in call["inputs"]} for call in jobs.cold.calls("compile")]
    # All but the LM head, which is not quantised.
    assert sum("float8_e4m3fn" in dtypes for dtypes in graphs) == len(graphs) - 1


@pytest.mark.wide
@pytest.mark.parametrize("name", ["glm4_moe", *WIDE])
def test_rounded_keys_and_values_are_those_of_steps_without_drafts(
    tmp_path: Path, name: str
) -> None:
    """With coarse scales of the checkpoint, of the MTP layer's cache as well."""
    fields = {**GLM_IN_BLOCKS, "max_position_embeddings": CONTEXT}
    made = tmp_path / "made"
    maker = quantized_maker(name, made, BLOCKS, cache_scales=SCALES, **fields)
    options = {"max_model_len": CONTEXT, "kv_cache_dtype": "fp8", "speculative_config": MTP}
    job = Job(
        maker.random(tmp_path / "random"),
        options,
        [PROMPTS],
        LENGTH,
        reference=maker.served,
        checks_all_drafts=True,
        cache_scales=SCALES,
    )
    (answers,) = job.expected()
    assert answers != replace(job, cache_scales=()).expected()[0]
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    fitted = replace(job, checkpoint=maker.fitted(tmp_path / "fitted", texts, last=LENGTH + 1))
    right = run([fitted], tmp_path / "npu")
    assert_cache_dtype(right, "torch.float8_e4m3fn")
    assert_fewer_runs([[answers]], right, run([job], tmp_path / "npu"))


@pytest.mark.parametrize("cache", ["fp8", "fp8_e5m2"])
def test_caches_of_fp8_are_taken(sdk: ModuleType, checkpoints: CheckpointCache, cache: str) -> None:
    """But for latent attention, which has no such op."""
    assert sdk
    assert config_of(checkpoints("glm4_moe"), kv_cache_dtype=cache)
    with pytest.raises(ValueError, match=f"--kv-cache-dtype {cache}: a KV cache in this dtype"):
        config_of(checkpoints("deepseek_v3"), kv_cache_dtype=cache)


def config_of(checkpoint: Path, fields: dict[str, Any] | None = None, **options: Any) -> VllmConfig:
    """Return the configuration on an NPU, of a checkpoint that says that it has an MTP layer."""
    return EngineArgs(
        str(checkpoint),
        speculative_config=MTP,
        hf_overrides={"num_nextn_predict_layers": 1, **(fields or {})},
        max_num_batched_tokens=128,
        additional_config={"rbln": {"device": "rebel"}},
        **options,
    ).create_engine_config()


@pytest.mark.parametrize(
    ("recipe", "name"),
    [
        (Recipe(format="fp8", block=(0, 0)), "fp8"),
        (Recipe(format="float-quantized"), "compressed-tensors float-quantized"),
    ],
)
def test_other_quantized_layers_are_refused(
    sdk: ModuleType, checkpoints: CheckpointCache, recipe: Recipe, name: str
) -> None:
    assert sdk
    fields = {"quantization_config": quantization_config(recipe)}
    with pytest.raises(ValueError, match=f"quantization '{name}': MTP with this model"):
        config_of(checkpoints("glm4_moe"), fields)
