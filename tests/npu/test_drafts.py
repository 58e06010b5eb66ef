"""Drafts over the double: steps of several tokens of a request give the tokens of single steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from rbln_backend.graphs.bundles import collect, write_folder
from rbln_backend.settings import compiled_sizes
from server.commands.cache import GraphChecks
from tests.checkpoints import CheckpointCache
from tests.draft_checkpoints import FITTED, RANDOM
from tests.e5m2_cache import answers_over_e5m2_cache
from tests.engine.support import make_prompts
from tests.engine.test_quantized import with_scales
from tests.mtp_checkpoints import MTP_LAYERS, MtpMaker, quantized_maker
from tests.npu.engines import Job, Ran, beside, run
from tests.npu.test_engines import IN_BLOCKS, SIZES, YARN_OVER_LONG
from tests.npu.test_quantized import SCALES, amplify_attention
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint, quantization_config

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

CONTEXT, MOST, LENGTH = 2048, 3, 36
# Beside a short one: answers that cross into the second block, and that end with the context.
PROMPTS = make_prompts([90, 1024 - 5, CONTEXT - LENGTH], seed=11)
SUFFIX = {"method": "suffix", "num_speculative_tokens": MOST}
NGRAM = {"method": "ngram", "num_speculative_tokens": MOST, "prompt_lookup_min": 1}
MTP = {"method": "mtp", "num_speculative_tokens": MOST}
MANUAL_BUCKETS = {
    "device": "rebel",
    "decode_batch_bucket_strategy": "manual",
    "decode_batch_bucket_manual_buckets": [1, 4, 16],
}
BLOCKS = Recipe(format="fp8", block=(64, 64))
GLM_IN_BLOCKS = {"intermediate_size": 128, "moe_intermediate_size": 64}
# So coarse that tokens depend on the rounding, and on which scale is whose; the MTP layer's last.
MTP_SCALES = ((4.0, 2.0), (2.0, 8.0), (8.0, 1.0), (16.0, 4.0))
METHODS = [
    "eagle3",  # reads three layers and maps a vocabulary
    *(pytest.param(n, marks=pytest.mark.wide) for n in ("medusa", "eagle", *MTP_LAYERS)),
]


@dataclass(frozen=True)
class Drafted:
    """Jobs without drafts, with right and with wrong ones, and the run of the right ones."""

    plain: Job
    right: Job
    wrong: Job
    cold: Ran
    folder: Path

    def assert_steps_saved(self, **double: Any) -> None:
        """Assert equal answers of right and wrong drafts, from the same graphs, in fewer runs."""
        wrong = run([self.wrong], self.folder / "npu", **double)
        assert self.cold.answers == wrong.answers == [self.plain.expected()]
        assert all(call["hit"] for call in wrong.calls("compile"))
        assert len(self.cold.calls("run")) < 0.8 * len(wrong.calls("run"))


def with_model(job: Job, method: str, own: Path) -> Job:
    """Return ``job`` with the draft model ``own``."""
    speculation = {"method": method, "model": str(own), "num_speculative_tokens": MOST}
    options = job.options | {"speculative_config": speculation}
    return replace(job, options=options, checks_all_drafts=True)


def answered(job: Job) -> list[list[int]]:
    """Return the prompts of ``job``'s first batch with their answers."""
    pairs = zip(job.batches[0], job.expected()[0], strict=True)
    return [prompt + answer for prompt, answer in pairs]


def drafted_by_model(
    job: Job, method: str, folder: Path, fitted: Mapping[str, Any] | None = None, **double: Any
) -> Drafted:
    """Return the jobs of a draft model of ``method``; ``fitted``: more fields of its making."""
    path, texts = job.reference or job.checkpoint, answered(job)
    last = LENGTH + (method != "medusa")
    own = FITTED[method](folder / "fitted", path, texts, last=last, **(fitted or {}))
    right = with_model(job, method, own)
    wrong = with_model(job, method, RANDOM[method](folder / "random", path))
    return Drafted(job, right, wrong, run([right], folder / "npu", **double), folder)


def drafted_by_layer(
    maker: MtpMaker, folder: Path, options: Mapping[str, Any] | None = None, **double: Any
) -> Drafted:
    """Return the jobs of a checkpoint's own MTP layer; ``options`` are of its engine."""
    plain = Job(
        maker.stored,
        {"max_model_len": CONTEXT, **(options or {})},
        [PROMPTS],
        LENGTH,
        reference=maker.served,
    )
    right, wrong = (
        replace(
            plain,
            checkpoint=own,
            options=plain.options | {"speculative_config": MTP},
            checks_all_drafts=True,
        )
        for own in (
            maker.fitted(folder / "fitted", answered(plain), last=LENGTH + 1),
            maker.random(folder / "random"),
        )
    )
    return Drafted(plain, right, wrong, run([right], folder / "npu", **double), folder)


def served(checkpoints: CheckpointCache, arch: str = "llama", **options: Any) -> Job:
    """Return a job of ``arch`` without drafts."""
    # gpt-oss' positions otherwise end before the context does.
    ropes = {"rope_parameters": YARN_OVER_LONG} if arch == "gpt_oss" else {}
    path = checkpoints(arch, max_position_embeddings=CONTEXT, **ropes)
    return Job(path, {"max_model_len": CONTEXT, **options}, [PROMPTS], LENGTH)


@pytest.fixture(scope="module", params=METHODS)
def drafted(
    checkpoints: CheckpointCache,
    tmp_path_factory: pytest.TempPathFactory,
    request: pytest.FixtureRequest,
) -> Drafted:
    name, folder = request.param, tmp_path_factory.mktemp("drafts")
    if name in FITTED:
        return drafted_by_model(served(checkpoints), name, folder)
    sizes = SIZES if name == "deepseek_v3" else {}
    fields = sizes | {"max_position_embeddings": CONTEXT}
    return drafted_by_layer(MtpMaker(name, checkpoints, **fields), folder)


def test_right_drafts_save_steps(drafted: Drafted) -> None:
    """Random weights give the same answers in more steps, each of which drafts as well."""
    drafted.assert_steps_saved()
    # Of the model: a prefill, steps of 1, 2 and 4 requests with one token and with four, the LM
    # head. Of drafts: a graph of heads for each size, or steps of both lengths and a prefill.
    heads = drafted.right.options["speculative_config"]["method"] == "medusa"
    assert len(drafted.cold.calls("compile")) == 1 + 3 * 2 + 1 + (3 if heads else 3 * 2 + 1)


@pytest.mark.wide
def test_stored_graphs_and_seeds_give_the_same_tokens(drafted: Drafted) -> None:
    root, bundle = drafted.folder / "cache", drafted.folder / "bundle"
    stored = {"cache_root": str(root)}
    _, warm = (run([drafted.right], drafted.folder / "npu", rbln=stored) for _ in range(2))
    write_folder(bundle, collect(root, GraphChecks()))
    seeded = [replace(job, seed=5) for job in (drafted.right, drafted.wrong)]
    host = drafted.folder / "host"
    bundled = run(seeded, host, rbln=beside(bundle, host))
    assert all(call["hit"] for ran in (warm, bundled) for call in ran.calls("compile"))
    assert warm.answers == drafted.cold.answers
    plain = run([replace(drafted.plain, seed=5)], drafted.folder / "plain")
    assert bundled.answers == plain.answers * 2 != drafted.cold.answers * 2


# --------------------------------------------------------------- drafts of texts alone


@pytest.fixture(scope="module")
def texts(checkpoints: CheckpointCache) -> Job:
    """The second time, the first answers are the drafts."""
    job = served(checkpoints, speculative_config=SUFFIX)
    return replace(job, batches=[PROMPTS, PROMPTS], checks_all_drafts=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("texts")


@pytest.fixture(scope="module")
def cold(texts: Job, folder: Path) -> Ran:
    return run([texts], folder)


def test_finished_answers_are_drafts(texts: Job, cold: Ran) -> None:
    assert cold.answers == [texts.expected()]
    # A prefill; decode steps of 1, 2 and 4 requests, with one token and with four; the head.
    assert len(cold.calls("compile")) == 1 + 3 * 2 + 1


@pytest.mark.wide
def test_tokens_behind_the_first_matter(texts: Job, folder: Path, cold: Ran) -> None:
    """The negative control: keys and values of later tokens are dropped, as if L were 1."""
    broken = run([texts], folder, **{"break": ["draft_rows"]})
    assert broken.answers[0] != cold.answers[0]


@pytest.mark.wide
def test_drafts_are_checked_by_the_tokens_that_the_graph_picked(
    texts: Job, folder: Path, cold: Ran
) -> None:
    """With another op, drafts of the same wrong answer are right the second time."""
    broken = run([texts], folder, **{"break": ["argmax"]})
    first, second = broken.answers[0]
    assert first == second != cold.answers[0][0]
    assert len(broken.calls("run")) == pytest.approx(len(cold.calls("run")), rel=0.2)


@pytest.mark.wide
def test_seeds_give_the_same_with_drafts(texts: Job, folder: Path) -> None:
    seeded = replace(texts, seed=5)
    plain = replace(seeded, options={"max_model_len": CONTEXT}, checks_all_drafts=False)
    drafted, single = (run([job], folder) for job in (seeded, plain))
    assert drafted.answers == single.answers != [texts.expected()]
    assert len(drafted.calls("run")) < len(single.calls("run"))


@pytest.mark.wide
def test_windows_in_pages_lose_no_token_to_a_draft(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    checkpoint = checkpoints("exaone4", max_position_embeddings=CONTEXT, sliding_window=200)
    options = {"max_model_len": CONTEXT, "speculative_config": NGRAM}
    job = Job(checkpoint, options, [PROMPTS], max_tokens=LENGTH, checks_all_drafts=True)
    assert run([job], tmp_path).answers == [job.expected()]


# ---------------------------------------------------------- other families and formats


@pytest.mark.wide
def test_host_sampling_reads_the_logits_before_the_hidden_states(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """Without ``argmax`` in the decode graphs; the heads' graphs end in it all the same."""
    jobs = drafted_by_model(served(checkpoints), "medusa", tmp_path, rbln={"sampler": False})
    assert jobs.cold.answers == [jobs.plain.expected()]


@pytest.mark.wide
@pytest.mark.parametrize("arch", ["qwen3", "minimax_m2", "gpt_oss"])
def test_eagle3_of_other_families(checkpoints: CheckpointCache, tmp_path: Path, arch: str) -> None:
    jobs = drafted_by_model(served(checkpoints, arch), "eagle3", tmp_path)
    assert jobs.cold.answers == [jobs.plain.expected()]


@pytest.mark.wide
@pytest.mark.parametrize(
    ("name", "sizes"), [("deepseek_v3", IN_BLOCKS), ("glm4_moe", GLM_IN_BLOCKS)]
)
def test_mtp_layers_in_blocks_of_fp8(tmp_path: Path, name: str, sizes: dict[str, int]) -> None:
    fields = sizes | {"max_position_embeddings": CONTEXT}
    jobs = drafted_by_layer(quantized_maker(name, tmp_path / "made", BLOCKS, **fields), tmp_path)
    jobs.assert_steps_saved()
    graphs = [{x["dtype"] for x in call["inputs"]} for call in jobs.cold.calls("compile")]
    # All but the LM head, which is not quantised.
    assert sum("float8_e4m3fn" in dtypes for dtypes in graphs) == len(graphs) - 1


def assert_cache_dtype(ran: Ran, dtype: str) -> None:
    """Assert that every attention op reads and writes a cache of ``dtype``."""
    ops = [op for call in ran.calls("compile") for op in call["sdk_ops"]]
    assert {arguments[-1] for name, arguments in ops if "causal" in name} == {dtype}


@pytest.mark.wide
def test_eagle_over_a_cache_of_e5m2(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    """The layer's own cache is of e5m2 as well; scales are 1.0."""
    job, ones = served(checkpoints, kv_cache_dtype="fp8_e5m2"), ((1.0, 1.0),) * 3
    answers = answers_over_e5m2_cache(job.checkpoint, PROMPTS, LENGTH, ones)
    assert [answers] != job.expected()
    texts = [prompt + answer for prompt, answer in zip(PROMPTS, answers, strict=True)]
    own = FITTED["eagle"](tmp_path / "fitted", job.checkpoint, texts, last=LENGTH + 1)
    right = run([with_model(job, "eagle", own)], tmp_path)
    assert_cache_dtype(right, "torch.float8_e5m2")
    random = RANDOM["eagle"](tmp_path / "random", job.checkpoint)
    assert_fewer_runs([[answers]], right, run([with_model(job, "eagle", random)], tmp_path))


def assert_fewer_runs(answers: list[list[list[list[int]]]], right: Ran, wrong: Ran) -> None:
    """Assert the same ``answers`` of right and of wrong drafts, in fewer runs of right ones."""
    assert right.answers == wrong.answers == answers
    assert all(call["hit"] for call in wrong.calls("compile"))
    assert len(right.calls("run")) < 0.8 * len(wrong.calls("run"))


@pytest.mark.wide
def test_eagle3_over_a_cache_of_e4m3(tmp_path: Path) -> None:
    """With coarse scales of the checkpoint, and 1.0 for the layer's own cache."""
    recipe = Recipe(format="fp8", block=(32, 64))
    path = make_quantized_checkpoint(
        "llama", tmp_path / "fp8", recipe, max_position_embeddings=CONTEXT
    )
    amplify_attention(path)
    job = Job(
        with_scales(path, SCALES),
        {"max_model_len": CONTEXT, "kv_cache_dtype": "fp8"},
        [PROMPTS],
        LENGTH,
        reference=path / "plain",
        cache_scales=SCALES,
    )
    assert job.expected() != replace(job, cache_scales=()).expected()
    jobs = drafted_by_model(job, "eagle3", tmp_path, {"cache_scales": SCALES})
    assert_cache_dtype(jobs.cold, "torch.float8_e4m3fn")
    jobs.assert_steps_saved()


@pytest.mark.wide
@pytest.mark.parametrize("name", ["glm4_moe", "ernie4_5_moe", "mimo"])
def test_mtp_layers_over_a_cache_of_e4m3(tmp_path: Path, name: str) -> None:
    """With coarse scales of the checkpoint, of the MTP layer's cache as well."""
    fields = {**GLM_IN_BLOCKS, "max_position_embeddings": CONTEXT}
    maker = quantized_maker(name, tmp_path / "made", BLOCKS, cache_scales=MTP_SCALES, **fields)
    job = Job(
        maker.random(tmp_path / "random"),
        {"max_model_len": CONTEXT, "kv_cache_dtype": "fp8", "speculative_config": MTP},
        [PROMPTS],
        LENGTH,
        reference=maker.served,
        checks_all_drafts=True,
        cache_scales=MTP_SCALES,
    )
    (answers,) = job.expected()
    assert answers != replace(job, cache_scales=()).expected()[0]
    fitted = maker.fitted(tmp_path / "fitted", answered(job), last=LENGTH + 1)
    right = run([replace(job, checkpoint=fitted)], tmp_path / "npu")
    assert_cache_dtype(right, "torch.float8_e4m3fn")
    assert_fewer_runs([[answers]], right, run([job], tmp_path / "npu"))


# ----------------------------------------------------------- sizes, without an engine


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
    sizes: Sequence[tuple[int, int]],
) -> None:
    assert sdk
    config = EngineArgs(
        str(checkpoints("llama", max_position_embeddings=CONTEXT)),
        max_num_seqs=16,
        max_num_batched_tokens=128,
        speculative_config=SUFFIX,
        additional_config={"rbln": MANUAL_BUCKETS | settings},
    ).create_engine_config()
    assert list(compiled_sizes(config).verify) == sizes


def mtp_config(
    checkpoint: Path, fields: dict[str, Any] | None = None, **options: Any
) -> VllmConfig:
    """Return the configuration on an NPU, of a checkpoint that says that it has an MTP layer."""
    return EngineArgs(
        str(checkpoint),
        speculative_config=MTP,
        hf_overrides={"num_nextn_predict_layers": 1, **(fields or {})},
        max_num_batched_tokens=128,
        additional_config={"rbln": {"device": "rebel"}},
        **options,
    ).create_engine_config()


@pytest.mark.parametrize("cache", ["fp8", "fp8_e5m2"])
def test_caches_of_fp8_are_taken(sdk: ModuleType, checkpoints: CheckpointCache, cache: str) -> None:
    """But for latent attention, which has no such op."""
    assert sdk
    assert mtp_config(checkpoints("glm4_moe"), kv_cache_dtype=cache)
    with pytest.raises(ValueError, match=f"--kv-cache-dtype {cache}: a KV cache in this dtype"):
        mtp_config(checkpoints("deepseek_v3"), kv_cache_dtype=cache)


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
        mtp_config(checkpoints("glm4_moe"), fields)
