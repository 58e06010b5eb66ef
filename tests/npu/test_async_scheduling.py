"""Asynchronous scheduling on the ``rebel`` device.

The double keeps outputs back until they are read: a call returns before anything is computed.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.checkpoints import CheckpointCache
from tests.npu.engines import ONE_CHUNK, THREE_CHUNKS, TWO_BLOCKS, Job, Ran, run
from tests.vendor.environment import torch_rbln_variables

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

LONG = {"max_position_embeddings": 4096}
IN_FLIGHT = {"async_scheduling": True}
SMALL = {
    "block_size": 512,
    "num_gpu_blocks_override": 4,
    "max_model_len": 1024,
    "enable_prefix_caching": False,
}


@pytest.fixture(scope="module")
def job(checkpoints: CheckpointCache) -> Job:
    """The last prompt begins as the second does."""
    batches = [[ONE_CHUNK, THREE_CHUNKS], [THREE_CHUNKS[:256] + ONE_CHUNK]]
    return Job(checkpoints("llama", **LONG), IN_FLIGHT, batches)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("async")


@pytest.fixture(scope="module")
def jobs(job: Job) -> list[Job]:
    """Greedy with a prefix hit, aborted in its prompt, sampled with a seed twice."""
    return [
        job,
        replace(job, batches=[[THREE_CHUNKS, ONE_CHUNK]], abort_after=2),
        replace(job, batches=[[ONE_CHUNK, THREE_CHUNKS]], seed=3),
        replace(job, options={}, batches=[[ONE_CHUNK, THREE_CHUNKS]], seed=3),
    ]


@pytest.fixture(scope="module")
def ran(jobs: list[Job], folder: Path) -> Ran:
    return run(jobs, folder, hold=1)


def test_answers_are_transformers(jobs: list[Job], ran: Ran) -> None:
    greedy, aborted, sampled, in_order = ran.answers
    assert greedy == jobs[0].expected()
    assert aborted == [[[], *batch[1:]] for batch in jobs[1].expected()]
    assert sampled == in_order, "the last job is without asynchronous scheduling"
    assert len(ran.calls("compile")) == 5 * len(jobs), "none while serving"
    # Each step waited once, for tokens that a call had not computed when it returned.
    assert len(ran.calls("waited")) > len(ran.calls("launch")) / 2 > 0


@pytest.mark.parametrize("reads", ["early", pytest.param("late", marks=pytest.mark.wide)])
def test_outputs_that_are_read_at_another_time_are_garbage(
    job: Job, folder: Path, ran: Ran, reads: str
) -> None:
    """The negative control: the runner is broken, and what it reads is wrong or no token."""
    assert ran.answers[0] == job.expected()
    broken = replace(job, batches=[[ONE_CHUNK]], reads=reads)
    try:
        answers = run([broken], folder, hold=1).answers[0]
    except AssertionError as failed:
        assert "Error" in str(failed)
    else:
        assert answers != broken.expected()


@pytest.mark.wide
def test_a_preempted_request_computes_its_token_once(job: Job, tmp_path: Path) -> None:
    """Two requests grow into their second block, and there are three."""
    growing = [TWO_BLOCKS[:508], TWO_BLOCKS[400:900]]
    preempted = replace(job, options=IN_FLIGHT | SMALL, batches=[growing], max_tokens=24)
    assert run([preempted], tmp_path, hold=1).answers[0] == preempted.expected()


@pytest.mark.wide
def test_tokens_on_the_npu_are_read_from_there(job: Job, tmp_path: Path) -> None:
    ran = run([job], tmp_path, environment=torch_rbln_variables(), hold=1)
    assert ran.answers[0] == job.expected()
    assert ran.calls("waited")
