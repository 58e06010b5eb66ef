"""Models that pool over the double: vectors equal transformers, cold, warm and over a bundle."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rbln_backend.graphs.bundles import collect, write_folder
from server.commands.cache import GraphChecks
from tests.checkpoints import CheckpointCache
from tests.npu.engines import BATCHES, ONE_CHUNK, THREE_CHUNKS, run_lives
from tests.pooling_checkpoints import classifier, encoder
from tests.pooling_reference import class_logits, hidden_states, pooled
from tests.sdk_double.launch import read_log
from tests.vendor.environment import torch_rbln_variables

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

SCRIPT = Path(__file__).with_name("pooling_script.py")
TOLERANCE = 1e-4
EMBED: dict[str, Any] = {"convert": "embed", "enable_chunked_prefill": True}


@dataclass(frozen=True)
class PoolingJob:
    """One pooling engine's life."""

    checkpoint: Path
    task: str = "embed"
    options: dict[str, Any] = field(default_factory=lambda: EMBED)
    batches: list[list[list[int]]] = field(default_factory=lambda: BATCHES)

    def expected(self, prompt: list[int]) -> Tensor:
        """Return the vector of transformers."""
        if self.task == "classify":
            scores: Tensor = class_logits(self.checkpoint, prompt).softmax(-1)
            return scores
        if self.options is EMBED:
            return pooled(self.checkpoint, prompt, "LAST")
        first: Tensor = torch.nn.functional.normalize(
            hidden_states(self.checkpoint, prompt)[0], dim=-1
        )
        return first

    def error(self, answers: list[list[list[float]]]) -> float:
        """Return the largest difference from transformers."""
        errors = [
            (torch.tensor(vector) - self.expected(prompt)).abs().max()
            for batch, vectors in zip(self.batches, answers, strict=True)
            for prompt, vector in zip(batch, vectors, strict=True)
        ]
        return float(torch.stack(errors).max())


def run(
    jobs: list[PoolingJob],
    folder: Path,
    *,
    rbln: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **double: Any,
) -> tuple[list[float], list[dict[str, Any]]]:
    """Each job's largest error, and the double's log."""
    fields = [{"task": job.task, "batches": job.batches} for job in jobs]
    answers, log = run_lives(SCRIPT, jobs, fields, folder, rbln, environment, **double)
    errors = [job.error(answer) for job, answer in zip(jobs, answers, strict=True)]
    return errors, read_log(log)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooling")


@pytest.fixture(scope="module")
def jobs(checkpoints: CheckpointCache, folder: Path) -> list[PoolingJob]:
    """A decoder, whose blocks are shared, and an encoder, which has none."""
    decoder = checkpoints("qwen3", max_position_embeddings=4096)
    bert = encoder("Bert", decoder, folder / "bert")
    return [
        PoolingJob(decoder),
        PoolingJob(bert, options={"max_model_len": 128}, batches=[[ONE_CHUNK]]),
    ]


def test_vectors_are_those_of_transformers(jobs: list[PoolingJob], folder: Path) -> None:
    for is_warm in (False, True):
        errors, log = run(jobs, folder)
        assert max(errors) < TOLERANCE
        hits = {call["hit"] for call in log if call["call"] == "compile"}
        assert hits == {is_warm}


@pytest.mark.wide
def test_a_bundle_serves_another_pooler_of_the_same_graphs(
    jobs: list[PoolingJob], tmp_path: Path
) -> None:
    run(jobs[:1], tmp_path)
    bundle = tmp_path / "bundle"
    write_folder(bundle, collect(tmp_path / "cache", GraphChecks()))
    scores = classifier(jobs[0].checkpoint, tmp_path / "classifier", num_labels=3)
    classes = PoolingJob(scores, "classify", {}, [[ONE_CHUNK, THREE_CHUNKS]])
    errors, log = run([jobs[0], classes], tmp_path / "host", rbln={"cache_bundles": [str(bundle)]})
    assert max(errors) < TOLERANCE
    assert all(call["hit"] for call in log if call["call"] == "compile")


@pytest.mark.wide
def test_tensors_of_the_device_pool_alike(jobs: list[PoolingJob], tmp_path: Path) -> None:
    errors, log = run(jobs, tmp_path, environment=torch_rbln_variables())
    assert max(errors) < TOLERANCE
    given = [x for call in log if call["call"] == "compile" for x in call["inputs"]]
    assert {x["device"] for x in given} == {"rbln"}


@pytest.mark.wide
def test_a_dropped_copy_is_seen(jobs: list[PoolingJob], tmp_path: Path) -> None:
    dropped: dict[str, Any] = {"break": ["kv_copy"]}
    errors, _ = run(jobs[:1], tmp_path, **dropped)
    # NaN, which the double leaves in blocks that nothing wrote.
    assert not errors[0] < TOLERANCE
