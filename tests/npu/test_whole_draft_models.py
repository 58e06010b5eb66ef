"""A whole draft model over the double: two models in one engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.npu.engines import Job, Ran, run
from tests.npu.test_draft_models import (
    assert_same_from_stored_graphs,
    assert_same_with_seeds,
    assert_steps_saved,
    with_model,
)
from tests.npu.test_drafts import BATCHES, CONTEXT, LENGTH
from tests.whole_draft_checkpoints import random_model

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("whole-draft-models")


@pytest.fixture(scope="module")
def same(checkpoints: CheckpointCache) -> Job:
    """A model that drafts for itself."""
    served = checkpoints("llama", max_position_embeddings=CONTEXT)
    job = Job(served, {"max_model_len": CONTEXT}, BATCHES, LENGTH, checks_all_drafts=True)
    return with_model(job, "draft_model", served)


@pytest.fixture(scope="module")
def cold(same: Job, folder: Path) -> Ran:
    return run([same], folder)


def test_right_drafts_save_steps(same: Job, folder: Path, cold: Ran) -> None:
    """A smaller model of random weights gives the same answers in more steps."""
    # A head size of the NPU's kernels.
    fields = {"head_dim": 64, "max_position_embeddings": CONTEXT}
    own = random_model(folder, same.checkpoint, arch="qwen3", **fields)
    wrong = run([with_model(same, "draft_model", own)], folder / "wrong")
    assert_steps_saved(same, cold, wrong)


@pytest.mark.wide
def test_answers_are_the_same_warm_over_a_bundle_and_with_seeds(
    same: Job, folder: Path, cold: Ran, tmp_path: Path
) -> None:
    assert_same_from_stored_graphs(same, folder, cold, tmp_path)
    assert_same_with_seeds(same, folder)
