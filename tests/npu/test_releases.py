"""The next release of the SDK, 0.12.1: ops with one more argument, and stricter rules."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from rbln_backend.errors import ConfigError, UnsupportedModelError
from rbln_backend.worker.worker import RblnWorker
from tests.checkpoints import CheckpointCache
from tests.draft_checkpoints import RANDOM
from tests.multimodal_checkpoints import make_multimodal_checkpoint
from tests.npu.engines import ONE_CHUNK, THREE_CHUNKS, Job, run
from tests.npu.test_drafts import with_model
from tests.npu.test_lora import Loras
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint
from tests.sdk_double.launch import install_metadata
from tests.vendor.environment import torch_rbln_variables

pytestmark = [pytest.mark.engine, pytest.mark.timeout(1800)]

LONG = {"max_position_embeddings": 4096}
BLOCK = {"block_size": 1024}
# The longer request comes last: of CR13's kernel it must be the first row. The first one still
# decodes when the second one begins to.
TOGETHER = [[ONE_CHUNK, THREE_CHUNKS]]
LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, **LONG}


@pytest.mark.parametrize(
    ("npu", "is_sorted"),
    [("RBLN-CR13", True), pytest.param("RBLN-CR03", False, marks=pytest.mark.wide)],
)
def test_attention_ops_are_told_the_order_of_rows(
    checkpoints: CheckpointCache, tmp_path: Path, npu: str, is_sorted: bool
) -> None:
    """A store of the release before has none of these graphs."""
    sizes = {"llama": LONG, "mistral": {**LONG, "sliding_window": 300}, "deepseek_v3": LATENT}
    jobs = [Job(checkpoints(name, **own), BLOCK, TOGETHER) for name, own in sizes.items()]
    wanted = [job.expected() for job in jobs]
    before = run(jobs[:1], tmp_path, npu=npu)
    # The first once more, whose graphs are stored then.
    ran = run([*jobs, jobs[0]], tmp_path, npu=npu, version="0.12.1")
    assert (before.answers, ran.answers) == (wanted[:1], [*wanted, wanted[0]])
    old, new = (
        {call["key"]: call["sdk_ops"] for call in calls.calls("compile") if call["sdk_ops"]}
        for calls in (before, ran)
    )
    assert old.keys().isdisjoint(new)
    ops = [op for ops in new.values() for op in ops if "attention" in op[0] or "mla" in op[0]]
    assert {arguments[-1] for _, arguments in ops} == {str(is_sorted)}
    assert len({name for name, _ in ops}) >= 5
    again = ran.calls("compile")[-len(before.calls("compile")) :]
    assert all(call["hit"] for call in again)


@pytest.mark.wide
def test_experts_in_nvfp4_have_no_limits(tmp_path: Path) -> None:
    recipe = Recipe(format="nvfp4", group_size=16, skipped=("self_attn", "mlp.gate"))
    path = make_quantized_checkpoint("qwen3_moe", tmp_path / "nvfp4", recipe, **LONG)
    job = Job(path, BLOCK, [[ONE_CHUNK]], reference=path / "plain")
    ran = run([job], tmp_path / "npu", version="0.12.1")
    assert ran.answers == [job.expected()]


@pytest.mark.parametrize(
    "kind",
    [
        "seeds and drafts",
        *(pytest.param(kind, marks=pytest.mark.wide) for kind in ("drafts of a model", "adapters")),
    ],
)
def test_rows_go_longest_first_whatever_they_hold(
    checkpoints: CheckpointCache, tmp_path: Path, kind: str
) -> None:
    """This release's double takes no other order, and the requests come in another."""
    path, environment = checkpoints("llama", **LONG), None
    job = Job(path, BLOCK, TOGETHER)
    if kind == "seeds and drafts":
        alone = replace(job, batches=[[prompt] for prompt in TOGETHER[0]], seed=3)
        drafts = {"speculative_config": {"method": "suffix", "num_speculative_tokens": 3}}
        with_drafts = replace(job, options=BLOCK | drafts, batches=TOGETHER * 2, seed=3)
        ran = run([alone, with_drafts], tmp_path, version="0.12.1")
        single = [answer for (answer,) in ran.answers[0]]
        assert ran.answers[1] == [single, single]
        return
    if kind == "adapters":
        loras = Loras(path, tmp_path)
        job = loras.job([[(ONE_CHUNK, "a"), (THREE_CHUNKS, "b")]], **BLOCK)
        wanted, environment = loras.expected(job), torch_rbln_variables()
    else:
        job = with_model(job, "eagle3", RANDOM["eagle3"](tmp_path / "drafts", path))
        wanted = job.expected()
    ran = run([job], tmp_path / "run", environment=environment, version="0.12.1")
    assert ran.answers == [wanted]


def test_drafts_come_after_chunks_of_one_token(
    checkpoints: CheckpointCache, tmp_path: Path
) -> None:
    """A step with one token of a prompt that goes on is no decode step, and has no drafts."""
    options = {
        **BLOCK,
        "long_prefill_token_threshold": 1,
        "speculative_config": {"method": "suffix", "num_speculative_tokens": 3},
    }
    prompt = ONE_CHUNK[:8]
    job = Job(checkpoints("llama", **LONG), options, [[prompt + prompt], [prompt + prompt]])
    ran = run([job], tmp_path, version="0.12.1")
    assert ran.answers == [job.expected()]


@pytest.fixture
def next_sdk(sdk: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Release 0.12.1 is what pip has installed."""
    assert sdk
    monkeypatch.syspath_prepend(str(install_metadata(tmp_path / "sdk", "0.12.1.dev288")))
    monkeypatch.setattr(EngineArgs, "get_batch_defaults", EngineArgs.get_batch_defaults)


def configure(path: Path, rbln: dict[str, Any] | None = None, **options: Any) -> VllmConfig:
    additional = {"rbln": {"device": "rebel"} | (rbln or {})}
    options = {"max_model_len": 4096, "additional_config": additional} | options
    return EngineArgs(str(path), **options).create_engine_config()


@pytest.mark.usefixtures("next_sdk")
@pytest.mark.parametrize(
    ("options", "rbln", "message"),
    [
        ({}, {}, "no --block-size: with RBLN SDK 0.12.1.dev288, --block-size must be given"),
        ({"block_size": 32768}, {}, "--block-size 32768: .* to 16384"),
        (
            {**BLOCK, "max_num_batched_tokens": 2048},
            {},
            "--max-num-batched-tokens 2048, --block-size 1024: .* at most the block size",
        ),
        (BLOCK, {"num_devices_per_local_rank": 2}, "=2: with RBLN SDK .* --tensor-parallel-size"),
        ({**BLOCK, "device_ids": [1]}, {"device": "emulated"}, "--device-ids: the emulated"),
    ],
)
def test_settings_that_the_next_release_refuses(
    checkpoints: CheckpointCache, options: dict[str, Any], rbln: dict[str, Any], message: str
) -> None:
    with pytest.raises((ValueError, ConfigError), match=message):
        configure(checkpoints("llama", **LONG), rbln, **options)


@pytest.mark.usefixtures("next_sdk")
def test_a_step_of_the_next_release_has_512_tokens(checkpoints: CheckpointCache) -> None:
    config = configure(checkpoints("llama", **LONG), **BLOCK)
    assert config.scheduler_config.max_num_batched_tokens == 512
    assert config.scheduler_config.max_num_seqs > 1


@pytest.mark.parametrize("release", ["sdk", "next_sdk"])
def test_mrope_is_refused_by_the_next_release(
    release: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(release)
    path = make_multimodal_checkpoint("qwen2_5_vl", tmp_path / "vl")
    options = {**BLOCK, "max_model_len": 1024, "rbln": {"disable_mm": True}}
    if release == "sdk":
        configure(path, **options)
    else:
        with pytest.raises((ValueError, ConfigError), match=r"\(M-RoPE\): not supported"):
            configure(path, **options)


@pytest.mark.usefixtures("sdk")
def test_the_v2_runner_is_ignored_with_a_warning(
    checkpoints: CheckpointCache, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    config = configure(checkpoints("llama", **LONG), **BLOCK)
    assert config.use_v2_model_runner is False


def test_no_part_is_discarded() -> None:
    for call in ("sleep", "discard"):
        with pytest.raises(UnsupportedModelError, match="sleeps, or discards"):
            getattr(RblnWorker, call)(None, ("weights",))
