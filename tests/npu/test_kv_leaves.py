"""KV leaves an NPU and comes back: to another server by NIXL, and to files over a restart.

Caches are tensors of torch's device ``rbln``, whose blocks torch copies to host memory and back, as
in the vendor's ``kv_buffer_device="cpu"``.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from pydantic import ValidationError
from vllm.engine.arg_utils import EngineArgs

from tests.checkpoints import CheckpointCache
from tests.engine.script import run_script
from tests.npu.engines import ONE_CHUNK, OPTIONS, SHARED, THREE_CHUNKS, TWO_BLOCKS, WHOLE_CHUNK, Job
from tests.sdk_double.launch import double_environment
from tests.vendor.environment import torch_rbln_variables

pytestmark = pytest.mark.timeout(1800)

SCRIPT = Path(__file__).with_name("transfer_script.py")
NIXL = Path(__file__).parents[1] / "nixl_double"
PROMPTS = [ONE_CHUNK, TWO_BLOCKS, THREE_CHUNKS, WHOLE_CHUNK]
LONG = {"max_position_embeddings": 4096}
LATENT = LONG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}


def leave(job: Job, folder: Path, *, tier: Path | None = None, **rbln: Any) -> Any:
    """Return what the script prints of ``job``, whose prompts are one batch."""
    settings = {"cache_root": str(folder / "cache")} | rbln
    request = {
        "path": str(job.checkpoint),
        "options": OPTIONS | {"additional_config": {"rbln": settings}} | job.options,
        "prompts": job.batches[0],
        "max_tokens": job.max_tokens,
        "folder": None if tier is None else str(tier),
    }
    variables = double_environment(folder / "calls.jsonl") | torch_rbln_variables()
    variables["PYTHONPATH"] = os.pathsep.join((variables["PYTHONPATH"], str(NIXL)))
    variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    return run_script(SCRIPT, request, variables, timeout_s=900)


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize(
    ("arch", "sizes", "options"),
    [("llama", LONG, {}), ("llama", LONG, {"kv_cache_dtype": "fp8"}), ("deepseek_v3", LATENT, {})],
)
def test_another_server_answers(
    checkpoints: CheckpointCache,
    tmp_path: Path,
    arch: str,
    sizes: dict[str, Any],
    options: dict[str, Any],
) -> None:
    """The second time, prefixes are in both servers: one block each is read."""
    path = checkpoints(arch, **sizes)
    scales = ((1.0, 1.0),) * 3 if options else ()
    job = Job(path, options, batches=[PROMPTS], cache_scales=scales)
    *rounds, (first, second) = leave(job, tmp_path)
    assert rounds == [job.expected()[0]] * 2
    assert first % 5 == 0
    assert second == first // 5 * 4


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize(
    ("arch", "sizes", "options"),
    [("llama", LONG, {}), ("deepseek_v3", LATENT, {})],
)
def test_files_outlive_the_engine(
    checkpoints: CheckpointCache,
    tmp_path: Path,
    arch: str,
    sizes: dict[str, Any],
    options: dict[str, Any],
) -> None:
    batch = [*PROMPTS, SHARED]
    job = Job(checkpoints(arch, **sizes), options, batches=[batch])
    first, second, cached = leave(job, tmp_path, tier=tmp_path / "tier")
    assert first == second == job.expected()[0]
    assert cached == [(len(prompt) - 1) // 128 * 128 for prompt in batch]


def test_caches_in_the_runtimes_of_the_sdk_are_refused(
    sdk: ModuleType, checkpoints: CheckpointCache
) -> None:
    """Without torch-rbln, no call copies a block to the host."""
    assert sdk
    options: dict[str, Any] = {"kv_offloading_size": 1, "max_num_batched_tokens": 128}
    options["additional_config"] = {"rbln": {"device": "rebel"}}
    path = checkpoints("llama", max_position_embeddings=4096)
    with pytest.raises(ValidationError, match="device 'rebel' without torch-rbln"):
        EngineArgs(str(path), **options).create_engine_config()
