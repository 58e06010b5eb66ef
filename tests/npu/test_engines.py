"""Whole engines on the ``rebel`` device, over a double of the SDK that is strict.

Answers must be those of transformers: cold, from this host's store, and over a bundle from another
host. Nothing here says that an NPU works; ``docs/npu.md`` says what the double is worth.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rbln_backend.graphs.bundles import collect, write_folder
from server.commands.cache import GraphChecks
from tests.checkpoints import CheckpointCache
from tests.npu.engines import ONE_CHUNK, OPTIONS, SHARED, TWO_BLOCKS, Job, Ran, run
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint
from tests.sdk_double.launch import double_environment, read_log
from tests.warm_process import warm_process

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

LONG = {"max_position_embeddings": 4096}
YARN_OVER_LONG = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
}
FAMILIES = {
    "llama": LONG,
    # Every other layer sees a window.
    "exaone4": {**LONG, "sliding_window": 200},
}
OTHERS = {
    # Its head has a bias: phases differ in what comes before a weight.
    "phi": LONG,
    "qwen3_moe": LONG,
    # All layers see a window, which reaches over blocks.
    "mistral": {**LONG, "sliding_window": 1100},
    # Sinks, windows and experts that the SDK's op does not know.
    "gpt_oss": {**LONG, "rope_parameters": YARN_OVER_LONG},
}


@pytest.fixture(scope="module", params=["dense", pytest.param("others", marks=pytest.mark.wide)])
def jobs(
    request: pytest.FixtureRequest,
    checkpoints: CheckpointCache,
    tmp_path_factory: pytest.TempPathFactory,
) -> list[Job]:
    """The first one has full attention."""
    if request.param == "dense":
        return [Job(checkpoints(name, **fields)) for name, fields in FAMILIES.items()]
    plain = [Job(checkpoints(name, **fields)) for name, fields in OTHERS.items()]
    folder = tmp_path_factory.mktemp("quantised")
    quantised = make_quantized_checkpoint("llama", folder, Recipe(group_size=128), **LONG)
    return [*plain, Job(quantised, reference=quantised / "plain")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, jobs: list[Job]) -> Path:
    assert jobs
    return tmp_path_factory.mktemp("npu")


@pytest.fixture(scope="module")
def cold(jobs: list[Job], folder: Path) -> Ran:
    return run(jobs, folder)


def config_of(job: Job) -> dict[str, Any]:
    return dict(json.loads((job.checkpoint / "config.json").read_text()))


def assert_as_transformers(jobs: list[Job], ran: Ran) -> None:
    for job, answers in zip(jobs, ran.answers, strict=True):
        assert answers == job.expected(), job.checkpoint.name


def test_cold_answers_are_transformers(jobs: list[Job], cold: Ran) -> None:
    assert_as_transformers(jobs, cold)
    compiles = cold.calls("compile")
    # Heads are alike in several of the models.
    assert not any(call["hit"] for call in compiles if call["sdk_ops"])
    assert len(compiles) == 5 * len(jobs), (
        "one prefill, three decodes, the head; none while serving"
    )
    # Every linear layer has axes of batch and sequence, the LM head too; the first has no experts.
    ranks = [call["linear_ranks"] for call in compiles[:5] if call["sdk_ops"]]
    assert ranks == [[3]] * 4
    # Of each group of layers the shared tokens of a block were copied.
    groups = [len(set(config_of(job).get("layer_types", ["full"]))) for job in jobs]
    assert [call["tokens"] for call in cold.calls("copy_kv")] == [512] * sum(groups)


def test_a_dropped_copy_is_seen(jobs: list[Job], folder: Path, cold: Ran) -> None:
    """The negative control of the test above: without the copy the answer after it is wrong."""
    broken = run(jobs[:1], folder, **{"break": ["kv_copy"]})
    expected = jobs[0].expected()
    assert broken.answers[0][:2] == expected[:2]
    assert broken.answers[0][2] != expected[2]
    assert cold.answers[0] == expected


def test_greedy_tokens_are_those_that_the_graph_picked(
    jobs: list[Job], folder: Path, cold: Ran
) -> None:
    job = Job(jobs[0].checkpoint, batches=[[ONE_CHUNK]], max_tokens=2)
    broken = run([job], folder, **{"break": ["argmax"]})
    (((expected, *_),),) = job.expected()
    assert broken.answers[0][0][0][0] != expected
    assert cold.answers[0][0][0][0] == expected


def test_warm_answers_are_transformers(jobs: list[Job], folder: Path, cold: Ran) -> None:
    warm = run(jobs, folder)
    assert_as_transformers(jobs, warm)
    assert all(call["hit"] for call in warm.calls("compile"))
    assert len(warm.calls("compile")) == len(cold.calls("compile"))


def test_a_bundle_carries_the_binaries(
    jobs: list[Job], folder: Path, cold: Ran, tmp_path: Path
) -> None:
    assert cold.answers
    bundle = tmp_path / "bundle"
    write_folder(bundle, collect(folder / "cache", GraphChecks()))
    elsewhere = run(jobs[1:3], tmp_path / "host", rbln={"cache_bundles": [str(bundle)]})
    assert_as_transformers(jobs[1:3], elsewhere)
    assert all(call["hit"] for call in elsewhere.calls("compile"))


def test_preempted_and_aborted_requests_leave_the_others_alone(
    jobs: list[Job], folder: Path, cold: Ran
) -> None:
    """Two requests grow into their second block, and there are three; one ends in its prompt."""
    assert cold.answers
    small = {"num_gpu_blocks_override": 4, "max_model_len": 2048, "enable_prefix_caching": False}
    prompts = [TWO_BLOCKS[:1020], TWO_BLOCKS[400:1410]]
    preempted = Job(jobs[0].checkpoint, small, [prompts, [SHARED, ONE_CHUNK]], max_tokens=24)
    # In the middle of the first prompt, of which a later one has the beginning.
    batches = [[TWO_BLOCKS, ONE_CHUNK], [ONE_CHUNK, SHARED]]
    aborted = Job(jobs[0].checkpoint, batches=batches, abort_after=7)
    ran = run([preempted, aborted], folder)
    expected = [[[], *batch[1:]] for batch in aborted.expected()]
    assert ran.answers == [preempted.expected(), expected]


def test_a_host_without_an_npu_compiles_for_one_that_has_it(
    jobs: list[Job], tmp_path: Path
) -> None:
    checkpoint, root = jobs[0].checkpoint, tmp_path / "cache"
    log = tmp_path / "compile.jsonl"
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in OPTIONS.items()
        if value is not True
    ]
    environment = double_environment(log, npu="") | {
        "RBLN_FORCE_NPU_NAME": "RBLN-CR13",
        "VLLM_CACHE_ROOT": str(root),
    }
    done = warm_process().run("compile", str(checkpoint), *flags, environ=environment, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert {tuple(call["options"]["mode"]) for call in read_log(log, "compile")} == {
        ("strict", "compile_only")
    }
    served = run(jobs[:1], tmp_path, rbln={"cache_root": str(root)})
    assert_as_transformers(jobs[:1], served)
    assert all(call["hit"] for call in served.calls("compile"))


@pytest.mark.wide
def test_there_are_no_more_blocks_than_the_ops_can_number(jobs: list[Job], tmp_path: Path) -> None:
    """This model's memory would be enough for some 40,000."""
    job = Job(jobs[0].checkpoint, {"num_gpu_blocks_override": None}, [[ONE_CHUNK], [SHARED]])
    ran = run([job], tmp_path)
    assert_as_transformers([job], ran)
    assert {call["shape"][0] for call in ran.calls("mark_static_address")} == {32767}
