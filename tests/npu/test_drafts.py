"""Drafts over the double: steps of several tokens of a request give the tokens of single steps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from rbln_backend.settings import compiled_sizes
from tests.checkpoints import CheckpointCache
from tests.engine.support import make_prompts
from tests.npu.engines import Job, Ran, run

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

CONTEXT, MOST, LENGTH = 2048, 3, 36
# Beside a short one: answers that cross into the second block, and that end with the context.
PROMPTS = make_prompts([90, 1024 - 5, CONTEXT - LENGTH], seed=11)
# The second time, the first answers are the drafts.
BATCHES = [PROMPTS, PROMPTS]
SUFFIX = {"method": "suffix", "num_speculative_tokens": MOST}
NGRAM = {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_min": 1}
OPTIONS: dict[str, Any] = {"max_model_len": CONTEXT, "speculative_config": SUFFIX}

BUCKETS = {
    "device": "rebel",
    "decode_batch_bucket_strategy": "manual",
    "decode_batch_bucket_manual_buckets": [1, 4, 16],
}


@pytest.fixture(scope="module")
def greedy(checkpoints: CheckpointCache) -> Job:
    checkpoint = checkpoints("llama", max_position_embeddings=CONTEXT)
    return Job(checkpoint, OPTIONS, BATCHES, max_tokens=LENGTH, checks_all_drafts=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drafts")


@pytest.fixture(scope="module")
def cold(greedy: Job, folder: Path) -> Ran:
    return run([greedy], folder)


def test_greedy_answers_are_transformers(greedy: Job, cold: Ran) -> None:
    assert cold.answers == [greedy.expected()]
    # A prefill; decode steps of 1, 2 and 4 requests, with one token and with four; the head.
    assert len(cold.calls("compile")) == 1 + 3 * 2 + 1


def test_warm_answers_are_transformers(greedy: Job, folder: Path, cold: Ran) -> None:
    warm = run([greedy], folder)
    assert warm.answers == cold.answers
    assert all(call["hit"] for call in warm.calls("compile"))


def test_tokens_behind_the_first_matter(greedy: Job, folder: Path, cold: Ran) -> None:
    """The negative control: keys and values of later tokens are dropped, as if L were 1."""
    broken = run([greedy], folder, **{"break": ["draft_rows"]})
    assert broken.answers[0] != cold.answers[0]


def test_drafts_are_checked_by_the_tokens_that_the_graph_picked(
    greedy: Job, folder: Path, cold: Ran
) -> None:
    """With another op, drafts of the same wrong answer are right the second time."""
    broken = run([greedy], folder, **{"break": ["argmax"]})
    first, second = broken.answers[0]
    assert first == second != cold.answers[0][0]
    assert len(broken.calls("run")) == pytest.approx(len(cold.calls("run")), rel=0.2)


@pytest.mark.wide
def test_seeds_give_the_same_with_drafts(greedy: Job, folder: Path) -> None:
    seeded = replace(greedy, seed=5)
    plain = replace(seeded, options={"max_model_len": CONTEXT}, checks_all_drafts=False)
    drafted, single = (run([job], folder) for job in (seeded, plain))
    assert drafted.answers == single.answers != [greedy.expected()]
    assert len(drafted.calls("run")) < len(single.calls("run"))


@pytest.mark.wide
def test_windows_in_pages_lose_no_token_to_a_draft(
    checkpoints: CheckpointCache, folder: Path
) -> None:
    checkpoint = checkpoints("exaone4", max_position_embeddings=CONTEXT, sliding_window=200)
    options = OPTIONS | {"speculative_config": NGRAM}
    job = Job(checkpoint, options, [PROMPTS], max_tokens=LENGTH, checks_all_drafts=True)
    ran = run([job], folder)
    assert ran.answers == [job.expected()]


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [(1, 4), (4, 4), (16, 4)]),
        ({"verify_lengths": [2, 4], "verify_tokens": 16}, [(1, 2), (1, 4), (4, 2), (4, 4)]),
    ],
)
def test_every_bucket_has_one_length_unless_others_are_configured(
    sdk: ModuleType,
    checkpoints: CheckpointCache,
    settings: dict[str, Any],
    sizes: list[tuple[int, int]],
) -> None:
    assert sdk
    config = EngineArgs(
        str(checkpoints("llama", max_position_embeddings=CONTEXT)),
        max_num_seqs=16,
        max_num_batched_tokens=128,
        speculative_config=SUFFIX,
        additional_config={"rbln": BUCKETS | settings},
    ).create_engine_config()
    assert list(compiled_sizes(config).verify) == sizes
