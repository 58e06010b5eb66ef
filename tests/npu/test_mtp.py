"""MTP layers over the double: right drafts save steps, and neither kind changes a token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from rbln_backend.store.bundle_contents import collect, write_folder
from server.commands.graph_checks import GraphChecks
from tests.checkpoints import CheckpointCache
from tests.mtp_checkpoints import MTP_LAYERS, MtpMaker, quantized_maker
from tests.npu.engines import Job, Ran, run
from tests.npu.test_draft_models import assert_steps_saved
from tests.npu.test_drafts import CONTEXT, LENGTH, MOST, PROMPTS
from tests.npu.test_latent import IN_BLOCKS, SIZES
from tests.quantized_checkpoints import Recipe, quantization_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MTP = {"method": "mtp", "num_speculative_tokens": MOST}
BLOCKS = Recipe(format="fp8", block=(64, 64))
GLM_IN_BLOCKS = {"intermediate_size": 128, "moe_intermediate_size": 64}
WIDE = ("ernie4_5_moe", "mimo")


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


def jobs_of(maker: MtpMaker, folder: Path, *, ranks: int = 1, **double: Any) -> MtpJobs:
    """Return the jobs of ``maker``'s checkpoints, the first of which ``run`` has run."""
    options = {"max_model_len": CONTEXT, "tensor_parallel_size": ranks}
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
    fields = {"quantization_config": quantization_config(recipe), "num_nextn_predict_layers": 1}
    options = {"device": "rebel"}
    arguments = EngineArgs(
        str(checkpoints("glm4_moe")),
        speculative_config=MTP,
        hf_overrides=fields,
        max_num_batched_tokens=128,
        additional_config={"rbln": options},
    )
    with pytest.raises(ValueError, match=f"quantization '{name}': MTP with this model"):
        arguments.create_engine_config()
