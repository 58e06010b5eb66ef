"""MTP layers over the double: right drafts save steps, and neither kind changes a token."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from rbln_backend.store.bundle_contents import collect, write_folder
from server.commands.graph_checks import GraphChecks
from tests.checkpoints import CheckpointCache
from tests.mtp_checkpoints import MTP_LAYERS, MtpMaker
from tests.npu.engines import Job, Ran, run
from tests.npu.test_drafts import CONTEXT, LENGTH, MOST, PROMPTS
from tests.npu.test_latent import SIZES

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

MTP = {"method": "mtp", "num_speculative_tokens": MOST}
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
    plain = Job(maker.served, {"max_model_len": CONTEXT}, [PROMPTS], LENGTH)
    (answers,) = plain.expected()
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    fitted, wrong = (
        replace(
            plain,
            checkpoint=own,
            options=plain.options | {"speculative_config": MTP},
            reference=maker.served,
            checks_all_drafts=True,
        )
        for own in (
            maker.fitted(folder / "fitted", texts, last=LENGTH + 1),
            maker.random(folder / "random"),
        )
    )
    return MtpJobs(plain, fitted, wrong, run([fitted], folder / "npu"), folder)


def test_right_drafts_save_steps(jobs: MtpJobs) -> None:
    """Random weights give the same answers in more steps, from the stored graphs."""
    assert jobs.cold.answers == [jobs.fitted.expected()]
    # A prefill; steps of 1, 2 and 4 requests with 1 and 4 tokens, of the model and of the layer;
    # the layer's prefill; the LM head.
    assert len(jobs.cold.calls("compile")) == 1 + 2 * 3 * 2 + 1 + 1
    wrong = run([jobs.wrong], jobs.folder / "npu")
    assert wrong.answers == jobs.cold.answers
    assert all(call["hit"] for call in wrong.calls("compile"))
    assert len(jobs.cold.calls("run")) < 0.8 * len(wrong.calls("run"))


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
