"""Quantised weights that the SDK's forms do not have: refused on an NPU by name, or expanded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import gguf
import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.scalar_type import scalar_types

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.gguf.checkpoint import write_checkpoint
from rbln_backend.parity.runners.plain_weights import plain_checkpoint
from rbln_backend.quantization.byte_linear import ByteWeights, RblnByteScheme
from rbln_backend.quantization.linear import RblnWna16LinearKernel
from tests.checkpoints import CheckpointCache
from tests.gguf_files import write_gguf
from tests.npu.engines import ONE_CHUNK, Job, run


def make_bytes() -> RblnByteScheme:
    return RblnByteScheme(ByteWeights(is_float=True, scope="channel"), "layers.0.o_proj")


def make_words(*, zeros: bool = True) -> RblnWna16LinearKernel:
    config = MPLinearLayerConfig(
        full_weight_shape=(128, 64),
        partition_weight_shape=(128, 64),
        weight_type=scalar_types.uint4 if zeros else scalar_types.uint4b8,
        act_type=torch.bfloat16,
        group_size=64,
        zero_points=zeros,
    )
    return RblnWna16LinearKernel(config, "qweight", "scales", "qzeros")


def on(device: str) -> VllmConfig:
    return VllmConfig(additional_config={"rbln": {"device": device}})


@pytest.mark.parametrize("make", [make_bytes, make_words])
def test_other_formats_than_the_sdk_s_are_refused(
    sdk: ModuleType, make: Callable[[], object]
) -> None:
    assert sdk
    with (
        set_current_vllm_config(on("rebel")),
        pytest.raises(UnsupportedModelError, match=r"on an NPU: .* run it on the emulated device"),
    ):
        make()
    with set_current_vllm_config(on("emulated")):
        make()


def test_symmetric_words_are_taken(sdk: ModuleType) -> None:
    assert sdk
    with set_current_vllm_config(on("rebel")):
        assert make_words(zeros=False).weights.symmetric


@pytest.mark.engine
def test_blocks_of_gguf_become_plain_weights(checkpoints: CheckpointCache, tmp_path: Path) -> None:
    original = checkpoints("llama", max_position_embeddings=4096, tie_word_embeddings=True)
    kind = gguf.GGMLQuantizationType
    file = tmp_path / "model.gguf"
    write_gguf(original, file, kind=kind.Q4_1, others={"token_embd": kind.Q8_0})
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    write_checkpoint(file, folder)
    with plain_checkpoint(str(folder), None) as plain:
        job = Job(folder, batches=[[ONE_CHUNK]], reference=Path(plain))
        assert run([job], tmp_path / "npu").answers == [job.expected()]
