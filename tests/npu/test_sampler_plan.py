"""Graphs that draw tokens: in the plan, in the report and in the memory; and what is refused."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs

from rbln_backend.devices.rebel.limits import Npu
from rbln_backend.worker.check import inspect_model
from rbln_backend.worker.memory import rank_memory
from rbln_backend.worker.preflight import planned_graphs, sampler_graphs
from tests.checkpoints import CheckpointCache


@pytest.fixture
def torch_rbln(sdk: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found, which is all that a configuration looks at."""
    assert sdk
    (tmp_path / "torch_rbln.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))


def config_of(checkpoint: Path, *, rbln: dict[str, Any], **options: Any) -> VllmConfig:
    settings = {"device": "rebel", "sample_on_device": True} | rbln
    sizes = {"max_model_len": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 128}
    return EngineArgs(
        str(checkpoint), **(sizes | options), additional_config={"rbln": settings}
    ).create_engine_config()


@pytest.mark.usefixtures("torch_rbln")
def test_graphs_that_draw_are_counted(checkpoints: CheckpointCache) -> None:
    checkpoint = checkpoints("llama", max_position_embeddings=4096)
    with_them = config_of(checkpoint, rbln={})
    without = config_of(checkpoint, rbln={"sample_on_device": False})
    assert list(map(str, sampler_graphs(with_them, planned_graphs(with_them)))) == [
        "sample-1",
        "sample-2",
        "sample-4",
    ]
    npu = Npu.named("RBLN-CR13")
    counts = [rank_memory(npu, config).num_graphs for config in (with_them, without)]
    assert counts[0] - counts[1] == 3
    for config in (with_them, without):
        # As with --max-model-len auto: the stored graphs are not compared, which needs the device.
        config.model_config.original_max_model_len = -1
    report = dict(inspect_model(with_them).lines())
    assert report["graphs"] == f"{counts[1]}, and 3 that draw tokens, compiled by every start"
    assert dict(inspect_model(without).lines())["graphs"] == str(counts[1])


@pytest.mark.usefixtures("torch_rbln")
@pytest.mark.parametrize(
    ("rbln", "options", "setting"),
    [
        ({"device": "emulated"}, {}, "device 'emulated'"),
        ({"use_device_tensor": False}, {}, "device 'rebel' without torch-rbln"),
        ({"sampler": False}, {}, "VLLM_RBLN_SAMPLER=0"),
        ({"enable_warm_up": False}, {}, "VLLM_RBLN_ENABLE_WARM_UP=0"),
        ({}, {"runner": "pooling"}, "--runner pooling"),
        ({}, {"tensor_parallel_size": 2}, "--tensor-parallel-size"),
        ({}, {"pipeline_parallel_size": 2}, "--pipeline-parallel-size"),
    ],
)
def test_other_engines_are_refused(
    checkpoints: CheckpointCache, rbln: dict[str, Any], options: dict[str, Any], setting: str
) -> None:
    with pytest.raises(ValueError, match=f"sample_on_device with {setting}"):
        config_of(checkpoints("llama", max_position_embeddings=4096), rbln=rbln, **options)
