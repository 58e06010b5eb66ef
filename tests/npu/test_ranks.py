"""Engines of two ranks over the double: each sees its own NPU, and each keeps its own binaries."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import vocab_parallel_embedding as layers

from rbln_backend.devices.rebel.embedding import RblnEmbedding
from rbln_backend.host.resources import core_budget
from tests.checkpoints import CheckpointCache
from tests.fitted_drafts import FITTED, RANDOM
from tests.mtp_checkpoints import MtpMaker
from tests.npu.engines import ONE_CHUNK, SHARED, TWO_BLOCKS, Job, run
from tests.npu.test_draft_models import with_model
from tests.npu.test_drafts import BATCHES, CONTEXT, LENGTH
from tests.npu.test_engines import config_of
from tests.npu.test_mtp import jobs_of
from tests.vendor.environment import torch_rbln_variables

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@pytest.mark.wide
@pytest.mark.parametrize(
    "options",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "async_scheduling": True},
        {"pipeline_parallel_size": 2},
    ],
    ids=["tensor", "tensor-in-flight", "pipeline"],
)
def test_two_ranks_answer_as_transformers(
    checkpoints: CheckpointCache, tmp_path: Path, options: dict[str, Any]
) -> None:
    checkpoint = checkpoints("llama", max_position_embeddings=4096)
    job = Job(checkpoint, options, [[ONE_CHUNK, TWO_BLOCKS], [SHARED]])
    cold = run([job], tmp_path, devices=4)
    assert cold.answers == [job.expected()]
    calls = [call for call in cold.calls("environment") if call["when"] == "open"]
    opened = [call["variables"] for call in calls]
    for call in calls:
        wanted = core_budget().threads(int(call["variables"]["LOCAL_RANK"]), 2)
        assert (call["threads"], call["variables"]["RBLN_NUM_THREADS"]) == (wanted, str(wanted))
    ranks = {variables["LOCAL_RANK"]: variables for variables in opened}
    assert {rank: variables["RBLN_VISIBLE_DEVICES"] for rank, variables in ranks.items()} == {
        "0": "0",
        "1": "1",
    }
    assert {variables["WORLD_SIZE"] for variables in ranks.values()} == {"2"}
    ops = [call["ops"] for call in cold.calls("compile") if call["sdk_ops"]]
    reduced = {counts.get("_c10d_functional::all_reduce", 0) for counts in ops}
    assert not any("Tensor.masked_fill_" in counts for counts in ops)
    layers = config_of(job)["num_hidden_layers"]
    expected = {2 * layers} if "tensor_parallel_size" in options else {0}
    assert reduced == expected, "none for the tokens, whose table each rank has"
    assert not cold.calls("ccl"), "without torch-rbln ranks talk over gloo"
    warm = run([job], tmp_path, devices=4)
    assert warm.answers == cold.answers
    assert warm.calls("compile")
    assert all(call["hit"] for call in warm.calls("compile"))


@pytest.mark.parametrize(
    ("device", "served", "own", "rows"),
    [
        ("rebel", False, False, 1024),
        ("rebel", True, True, 512),
        # The layer of a draft model reads the served model's.
        ("rebel", True, False, 512),
        ("emulated", False, False, 512),
    ],
)
def test_a_rank_has_the_whole_embedding_unless_it_is_the_head(
    sdk: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    *,
    served: bool,
    own: bool,
    rows: int,
) -> None:
    assert sdk
    for name, value in (("rank", 1), ("world_size", 2)):
        monkeypatch.setattr(layers, f"get_tensor_model_parallel_{name}", lambda value=value: value)
    config: Any = VllmConfig(additional_config={"rbln": {"device": device}})
    models = [
        SimpleNamespace(hf_text_config=SimpleNamespace(tie_word_embeddings=tied))
        for tied in (own, served)
    ]
    config.model_config = models[0]
    config.speculative_config = SimpleNamespace(target_model_config=models[1])
    with set_current_vllm_config(config):
        embedding = RblnEmbedding(1000, 8)
    assert len(embedding.weight) == rows


@pytest.mark.wide
@pytest.mark.parametrize("auto_port", [None, "0"])
def test_ranks_with_device_tensors_join_groups_of_the_device(
    checkpoints: CheckpointCache, tmp_path: Path, auto_port: str | None
) -> None:
    checkpoint = checkpoints("llama", max_position_embeddings=4096)
    job = Job(checkpoint, {"tensor_parallel_size": 2}, [[ONE_CHUNK, TWO_BLOCKS], [SHARED]])
    environment = torch_rbln_variables()
    environment |= {} if auto_port is None else {"VLLM_RBLN_AUTO_PORT": auto_port}
    ran = run([job], tmp_path, environment=environment, devices=4)
    assert ran.answers == [job.expected()]
    groups = [call for call in ran.calls("ccl") if call["size"] == 2]
    assert {call["rank"] for call in groups} == {"0", "1"}
    assert {call["finds_ports"] for call in groups} == {None if auto_port else "1"}


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("method", "ranks"),
    [*((method, "tensor") for method in FITTED), *((method, "pipeline") for method in FITTED)],
)
def test_two_ranks_with_a_draft_model(
    checkpoints: CheckpointCache, tmp_path: Path, method: str, ranks: str
) -> None:
    """Right drafts save steps; random ones give the same answers in more."""
    served = checkpoints("llama", max_position_embeddings=CONTEXT)
    options = {"max_model_len": CONTEXT, f"{ranks}_parallel_size": 2}
    job = Job(served, options, BATCHES, LENGTH, checks_all_drafts=True)
    expected = job.expected()
    texts = [prompt + answer for prompt, answer in zip(BATCHES[0], expected[0], strict=True)]
    right = FITTED[method](tmp_path / "right", served, texts, last=LENGTH + (method != "medusa"))
    wrong = RANDOM[method](tmp_path / "wrong", served)
    fitted, random = (
        run([with_model(job, method, own)], tmp_path, devices=4) for own in (right, wrong)
    )
    assert fitted.answers == random.answers == [expected]
    assert len(fitted.calls("run")) < 0.8 * len(random.calls("run"))
    assert all(call["hit"] for call in random.calls("compile"))


@pytest.mark.wide
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", ["tensor", "pipeline"])
def test_two_ranks_with_an_mtp_layer(
    checkpoints: CheckpointCache, tmp_path: Path, ranks: str
) -> None:
    maker = MtpMaker("glm4_moe", checkpoints, max_position_embeddings=CONTEXT)
    jobs = jobs_of(maker, tmp_path, {f"{ranks}_parallel_size": 2}, devices=4)
    assert jobs.cold.answers == [jobs.fitted.expected()]
    wrong = run([jobs.wrong], tmp_path / "npu", devices=4)
    assert wrong.answers == jobs.cold.answers
    assert len(jobs.cold.calls("run")) < 0.8 * len(wrong.calls("run"))
