"""Whole engines on the ``rebel`` device, over a double of the SDK that is strict.

Answers must be those of transformers: cold, from this host's store, and over a bundle from another
host. Nothing here says that an NPU works; ``docs/npu.md`` says what the double is worth.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rbln_backend.graphs.bundles import collect, write_folder
from server.commands.cache import GraphChecks
from tests.checkpoint_families import FULL, SLIDING
from tests.checkpoints import CheckpointCache
from tests.engine.script import run_script
from tests.minimax_checkpoint import AS_DEPLOYED, CACHE_SCALES, LAYERS, PROMPTS, make_minimax
from tests.npu.engines import (
    BATCHES,
    ONE_CHUNK,
    OPTIONS,
    SHARED,
    THREE_CHUNKS,
    TWO_BLOCKS,
    Job,
    Ran,
    beside,
    run,
    run_lives,
)
from tests.pooling_checkpoints import class_logits, classifier, encoder, hidden_states, pooled
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint
from tests.reference import reference_generate
from tests.sdk_double.launch import double_environment, read_log
from tests.vendor.environment import torch_rbln_variables
from tests.warm_process import warm_process

pytestmark = pytest.mark.engine

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
# Two layers each: their graphs are captured anew in every run.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {**LONG, "num_hidden_layers": 2},
    # The first layer sees a window.
    "exaone4": {
        **LONG,
        "num_hidden_layers": 2,
        "layer_types": [SLIDING, FULL],
        "sliding_window": 200,
    },
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
def store(folder: Path) -> dict[str, Any]:
    """Settings of engines whose graphs no other module's engines have stored."""
    return {"cache_root": str(folder / "cache")}


@pytest.fixture(scope="module")
def cold(jobs: list[Job], folder: Path, store: dict[str, Any]) -> Ran:
    return run(jobs, folder, rbln=store)


def config_of(job: Job) -> dict[str, Any]:
    return dict(json.loads((job.checkpoint / "config.json").read_text()))


def assert_as_transformers(jobs: list[Job], ran: Ran) -> None:
    for job, answers in zip(jobs, ran.answers, strict=True):
        assert answers == job.expected(), job.checkpoint.name


@pytest.mark.timeout(1800)
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


@pytest.mark.timeout(1800)
@pytest.mark.wide
def test_a_dropped_copy_is_seen(jobs: list[Job], folder: Path, cold: Ran) -> None:
    """The negative control of the test above: without the copy the answer after it is wrong."""
    broken = run(jobs[:1], folder, **{"break": ["kv_copy"]})
    expected = jobs[0].expected()
    assert broken.answers[0][:2] == expected[:2]
    assert broken.answers[0][2] != expected[2]
    assert cold.answers[0] == expected


@pytest.mark.timeout(1800)
def test_greedy_tokens_are_those_that_the_graph_picked(
    jobs: list[Job], folder: Path, cold: Ran
) -> None:
    job = Job(jobs[0].checkpoint, batches=[[ONE_CHUNK]], max_tokens=2)
    broken = run([job], folder, **{"break": ["argmax"]})
    (((expected, *_),),) = job.expected()
    assert broken.answers[0][0][0][0] != expected
    assert cold.answers[0][0][0][0] == expected


@pytest.mark.timeout(1800)
def test_warm_answers_are_transformers(
    jobs: list[Job], folder: Path, store: dict[str, Any], cold: Ran
) -> None:
    warm = run(jobs, folder, rbln=store)
    assert_as_transformers(jobs, warm)
    assert all(call["hit"] for call in warm.calls("compile"))
    assert len(warm.calls("compile")) == len(cold.calls("compile"))


@pytest.mark.timeout(1800)
def test_a_bundle_carries_the_binaries(
    jobs: list[Job], folder: Path, cold: Ran, tmp_path: Path
) -> None:
    assert cold.answers
    bundle = tmp_path / "bundle"
    write_folder(bundle, collect(folder / "cache", GraphChecks()))
    elsewhere = run(jobs[1:3], tmp_path / "host", rbln=beside(bundle, tmp_path / "host"))
    assert_as_transformers(jobs[1:3], elsewhere)
    assert all(call["hit"] for call in elsewhere.calls("compile"))


@pytest.mark.timeout(1800)
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


@pytest.mark.timeout(1800)
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


@pytest.mark.timeout(1800)
@pytest.mark.wide
def test_there_are_no_more_blocks_than_the_ops_can_number(jobs: list[Job], tmp_path: Path) -> None:
    """This model's memory would be enough for some 40,000."""
    job = Job(jobs[0].checkpoint, {"num_gpu_blocks_override": None}, [[ONE_CHUNK], [SHARED]])
    ran = run([job], tmp_path)
    assert_as_transformers([job], ran)
    assert {call["shape"][0] for call in ran.calls("mark_static_address")} == {32767}


# ------------------------------------------------------------------------------------------- latent
# Latent attention over the double: answers are those of transformers.


# The sizes that the SDK's ops take.
SIZES = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 4096}
IN_BLOCKS = SIZES | {
    "q_lora_rank": 64,
    "v_head_dim": 48,
    "intermediate_size": 128,
    "moe_intermediate_size": 64,
}
DRAFTS = {"method": "suffix", "num_speculative_tokens": 3}


@pytest.mark.timeout(900)
def test_answers_are_transformers(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    """And wrong without the copies."""
    job = Job(checkpoints("deepseek_v3", **SIZES), batches=[[ONE_CHUNK, TWO_BLOCKS], [SHARED]])
    cold = run([job], tmp_path)
    assert cold.answers == [job.expected()]
    ops = {name for call in cold.calls("compile") for name, _ in call["sdk_ops"]}
    phases = {f"rbln_custom_ops::paged_flash_causal_mla_naive_{x}" for x in ("prefill", "decode")}
    assert phases <= ops
    # Weights of heads are prepared once; nothing is computed of a router's bias.
    assert [call["of_weights"] for call in cold.calls("compile")] == [[]] * 5
    broken = run([job], tmp_path, **{"break": ["kv_copy"]})
    assert broken.answers[0][0] == cold.answers[0][0]
    assert broken.answers[0][1] != cold.answers[0][1]
    assert all(call["hit"] for call in broken.calls("compile"))


@pytest.mark.timeout(900)
@pytest.mark.wide
def test_fp8_weights_answer_as_their_float32_copy(tmp_path: Path) -> None:
    """In blocks, as DeepSeek publishes them; the projection that is absorbed is expanded."""
    recipe = Recipe(format="fp8", block=(64, 64))
    path = make_quantized_checkpoint("deepseek_v3", tmp_path / "fp8", recipe, **IN_BLOCKS)
    job = Job(path, batches=[[ONE_CHUNK]], reference=path / "plain")
    ran = run([job], tmp_path / "npu")
    assert ran.answers == [job.expected()]
    given = {x["dtype"] for call in ran.calls("compile") for x in call["inputs"]}
    assert "float8_e4m3fn" in given


@pytest.mark.timeout(900)
@pytest.mark.wide
def test_drafts_lose_no_token(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    """The second time, the first answers are the drafts, and fewer steps give them."""
    path, prompts = checkpoints("deepseek_v3", **SIZES), [ONE_CHUNK, TWO_BLOCKS]
    job = Job(path, {"speculative_config": DRAFTS}, [prompts, prompts], 16, checks_all_drafts=True)
    ran = run([job], tmp_path)
    assert ran.answers == [job.expected()]
    broken = run([job], tmp_path, **{"break": ["draft_rows"]})
    assert broken.answers != ran.answers


# ------------------------------------------------------------------------------------------ pooling
# Models that pool over the double: vectors equal transformers, cold, warm and over a bundle.


SCRIPT = Path(__file__).with_name("pooling_script.py")
TOLERANCE = 1e-4
EMBED: dict[str, Any] = {"convert": "embed", "enable_chunked_prefill": True}


@dataclass(frozen=True)
class PoolingJob:
    checkpoint: Path
    task: str = "embed"
    options: dict[str, Any] = field(default_factory=lambda: EMBED)
    batches: list[list[list[int]]] = field(default_factory=lambda: BATCHES)

    def expected(self, prompt: list[int]) -> Tensor:
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
        errors = [
            (torch.tensor(vector) - self.expected(prompt)).abs().max()
            for batch, vectors in zip(self.batches, answers, strict=True)
            for prompt, vector in zip(batch, vectors, strict=True)
        ]
        return float(torch.stack(errors).max())


def pooling_run(
    jobs: list[PoolingJob],
    folder: Path,
    *,
    rbln: dict[str, Any] | None = None,
    environment: dict[str, str] | None = None,
    **double: Any,
) -> tuple[list[float], list[dict[str, Any]]]:
    fields = [{"task": job.task, "batches": job.batches} for job in jobs]
    answers, log = run_lives(SCRIPT, jobs, fields, folder, rbln, environment, **double)
    errors = [job.error(answer) for job, answer in zip(jobs, answers, strict=True)]
    return errors, read_log(log)


@pytest.fixture(scope="module")
def pooling_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pooling")


@pytest.fixture(scope="module")
def pooling_jobs(checkpoints: CheckpointCache, pooling_folder: Path) -> list[PoolingJob]:
    """A decoder, whose blocks are shared, and an encoder, which has none."""
    decoder = checkpoints("qwen3", max_position_embeddings=4096)
    bert = encoder("Bert", decoder, pooling_folder / "bert")
    return [
        PoolingJob(decoder),
        PoolingJob(bert, options={"max_model_len": 128}, batches=[[ONE_CHUNK]]),
    ]


@pytest.mark.timeout(900)
def test_vectors_are_those_of_transformers(
    pooling_jobs: list[PoolingJob], pooling_folder: Path
) -> None:
    for _ in range(2):
        errors, log = pooling_run(pooling_jobs, pooling_folder)
        assert max(errors) < TOLERANCE
    assert {call["hit"] for call in log if call["call"] == "compile"} == {True}


@pytest.mark.timeout(900)
@pytest.mark.wide
def test_a_bundle_serves_another_pooler_of_the_same_graphs(
    pooling_jobs: list[PoolingJob], tmp_path: Path
) -> None:
    pooling_run(pooling_jobs[:1], tmp_path, rbln={"cache_root": str(tmp_path / "cache")})
    bundle = tmp_path / "bundle"
    write_folder(bundle, collect(tmp_path / "cache", GraphChecks()))
    scores = classifier(pooling_jobs[0].checkpoint, tmp_path / "classifier", num_labels=3)
    classes = PoolingJob(scores, "classify", {}, [[ONE_CHUNK, THREE_CHUNKS]])
    errors, log = pooling_run(
        [pooling_jobs[0], classes], tmp_path / "host", rbln=beside(bundle, tmp_path / "host")
    )
    assert max(errors) < TOLERANCE
    assert all(call["hit"] for call in log if call["call"] == "compile")


@pytest.mark.timeout(900)
@pytest.mark.wide
def test_tensors_of_the_device_pool_alike(pooling_jobs: list[PoolingJob], tmp_path: Path) -> None:
    errors, log = pooling_run(pooling_jobs, tmp_path, environment=torch_rbln_variables())
    assert max(errors) < TOLERANCE
    given = [x for call in log if call["call"] == "compile" for x in call["inputs"]]
    assert {x["device"] for x in given} == {"rbln"}


@pytest.mark.timeout(900)
@pytest.mark.wide
def test_a_dropped_pooling_copy_is_seen(pooling_jobs: list[PoolingJob], tmp_path: Path) -> None:
    dropped: dict[str, Any] = {"break": ["kv_copy"]}
    errors, _ = pooling_run(pooling_jobs[:1], tmp_path, **dropped)
    # NaN, which the double leaves in blocks that nothing wrote.
    assert not errors[0] < TOLERANCE


# ---------------------------------------------------------------------------------- prompt logprobs
# Prompt log-probabilities on the ``rebel`` device, over the SDK's double.
#
# The head's graph computes the logits of a chunk's rows after the chunk; the vendor's plug-in
# fails on these requests (`npu-0.12-parity.md`).


PROMPT_LOGPROBS_SCRIPT = Path(__file__).with_name("prompt_logprobs_script.py")
POSITIONS = (1, 2, 89, 127, 128, 129, 255, 256, 299)
"""Of tokens whose values are compared: in and at the edges of chunks of 128."""


@dataclass(frozen=True)
class Life:
    checkpoint: Path
    options: dict[str, Any] = field(default_factory=dict)


@pytest.mark.timeout(900)
def test_values_are_transformers(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    checkpoint = checkpoints("llama", max_position_embeddings=4096)
    prompts = [THREE_CHUNKS, ONE_CHUNK]
    fields = [{"prompts": prompts}]
    ((long, short),), _ = run_lives(
        PROMPT_LOGPROBS_SCRIPT, [Life(checkpoint)], fields, tmp_path, None, None
    )
    for prompt, answer in ((THREE_CHUNKS, long), (ONE_CHUNK, short)):
        assert answer["tokens"] == reference_generate(checkpoint, prompt, 2).token_ids
        assert len(answer["scores"]) == len(prompt) - 1
        for position in (place for place in POSITIONS if place < len(prompt)):
            logprobs = reference_generate(checkpoint, prompt[:position], 1).logprobs[0]
            expected = float(logprobs[prompt[position]])
            logprob, rank = answer["scores"][position - 1]
            assert logprob == pytest.approx(expected, abs=1e-3), (len(prompt), position)
            assert rank == int((logprobs > expected).sum()) + 1


# ----------------------------------------------------------------------------------- shared experts
# Two engines over the double that share experts: answers are those of one engine.


# Wide: every start is two or four processes, a minute of two cores.

SHARED_EXPERTS_SCRIPT = Path(__file__).with_name("shared_experts_script.py")
SHARED_EXPERTS_PROMPTS, NUM_TOKENS = [ONE_CHUNK, THREE_CHUNKS, TWO_BLOCKS], 6


@pytest.mark.wide
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        {"enable_expert_parallel": True},
        {},
        {"enable_expert_parallel": True, "tensor_parallel_size": 2},
    ],
    ids=["expert", "split", "tensor"],
)
def test_two_engines_answer_as_transformers(
    checkpoints: CheckpointCache, tmp_path: Path, options: dict[str, Any]
) -> None:
    path = checkpoints("qwen3_moe", max_position_embeddings=4096)
    expected = [
        reference_generate(path, prompt, NUM_TOKENS).token_ids for prompt in SHARED_EXPERTS_PROMPTS
    ]
    rbln = {"cache_root": str(tmp_path / "cache"), "num_threads": 1}
    request = {
        "path": str(path),
        "options": OPTIONS | {"additional_config": {"rbln": rbln}} | options,
        "prompts": SHARED_EXPERTS_PROMPTS,
        "max_tokens": NUM_TOKENS,
    }
    for is_warm in (False, True):
        log = tmp_path / f"calls-{is_warm}.jsonl"
        variables = double_environment(log, devices=4) | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
        answers = run_script(
            SHARED_EXPERTS_SCRIPT, request, variables, timeout_s=400, own_imports=True
        )
        assert answers == [expected, expected]
        opened = [x["variables"] for x in read_log(log, "environment") if x["when"] == "open"]
        assert len({told["RBLN_VISIBLE_DEVICES"] for told in opened}) == len(opened) > 1
        compiles = read_log(log, "compile")
        assert compiles
        assert all(call["hit"] for call in compiles) == is_warm


# ----------------------------------------------------------------------------------- device tensors
# Weights, caches and buffers as tensors of torch's device ``rbln``: the vendor's default form.
#
# torch-rbln is the vendor's wheel, over a small library of ours that stands for the driver; the
# SDK is the double.


@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_answers_with_device_tensors_are_transformers(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    environment = torch_rbln_variables()
    jobs = [
        Job(checkpoints("llama", **LONG)),
        Job(checkpoints("exaone4", **LONG, sliding_window=200)),
        Job(checkpoints("qwen3_moe", **LONG)),
    ]
    ran = run(jobs, tmp_path, environment=environment)
    assert [job.expected() for job in jobs] == ran.answers
    compiles = ran.calls("compile")
    assert compiles
    for call in compiles:
        assert {given["device"] for given in call["inputs"]} == {"rbln"}
        assert call["options"]["model_trace_method"] == "export"
        assert "compile_context" not in call["options"]
    assert not ran.calls("copy_kv"), "torch copies the heads of blocks"
    warm = run(jobs[:1], tmp_path, environment=environment)
    assert warm.answers == ran.answers[:1]
    assert all(call["hit"] for call in warm.calls("compile"))


@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_a_required_but_missing_package_is_refused(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    job = Job(checkpoints("llama", **LONG))
    with pytest.raises(AssertionError, match=r"use_device_tensor .* needs torch-rbln"):
        run([job], tmp_path, rbln={"use_device_tensor": True})


# ------------------------------------------------------------------------------------------ minimax
# MiniMax-M2.7 as the vendor deploys it, small: FP8 experts, an FP8 cache, blocks of 4,096.
#
# Its prompts are read by four pipeline stages, its answers written by four engines that share the
# experts.


MINIMAX_NUM_TOKENS = 6


@dataclass(frozen=True)
class Small:
    """The checkpoint, and answers of transformers over keys and values of e4m3."""

    path: Path
    prompts: list[list[int]]
    answers: list[list[int]]

    def job(self, **options: Any) -> Job:
        """Return an engine's life with ``options`` beyond those of the deployment."""
        return Job(
            self.path,
            AS_DEPLOYED | options,
            [self.prompts],
            MINIMAX_NUM_TOKENS,
            reference=self.path / "plain",
            cache_scales=CACHE_SCALES,
        )


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Small:
    path = make_minimax(tmp_path_factory.mktemp("minimax") / "fp8")
    unanswered = Small(path, PROMPTS, [])
    (answers,) = unanswered.job().expected()
    return Small(path, unanswered.prompts, answers)


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        ("pipeline_parallel_size", 1),
        ("pipeline_parallel_size", LAYERS),
        # The norms of queries and keys sum over both ranks.
        ("tensor_parallel_size", 2),
    ],
)
def test_ranks_answer_as_transformers(small: Small, tmp_path: Path, name: str, ranks: int) -> None:
    ran = run([small.job(**{name: ranks})], tmp_path, devices=4)
    assert ran.answers == [[small.answers]]
    opened = [x["variables"] for x in ran.calls("environment") if x["when"] == "open"]
    assert len({found["RBLN_VISIBLE_DEVICES"] for found in opened}) == ranks


@pytest.mark.wide
@pytest.mark.timeout(1800)
def test_four_engines_that_share_experts_answer_as_transformers(
    small: Small, tmp_path: Path
) -> None:
    rbln = {"cache_root": str(tmp_path / "cache"), "num_threads": 1}
    options = {"data_parallel_size": 4, "enable_expert_parallel": True}
    request = {
        "path": str(small.path),
        "options": OPTIONS | AS_DEPLOYED | {"additional_config": {"rbln": rbln}} | options,
        "prompts": small.prompts,
        "max_tokens": MINIMAX_NUM_TOKENS,
    }
    log = tmp_path / "calls.jsonl"
    variables = double_environment(log, devices=4) | {"VLLM_WORKER_MULTIPROC_METHOD": "spawn"}
    answers = run_script(
        SHARED_EXPERTS_SCRIPT, request, variables, timeout_s=1500, own_imports=True
    )
    assert answers == [small.answers, small.answers]
    opened = [x["variables"] for x in read_log(log, "environment") if x["when"] == "open"]
    assert len({found["RBLN_VISIBLE_DEVICES"] for found in opened}) == 4
