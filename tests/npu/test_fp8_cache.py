"""KV caches of 8-bit floats over the double: as transformers over rounded keys and values."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.graphs.bundles import collect, write_folder
from rbln_backend.layers.attention import RblnAttentionImpl
from server.commands.cache import GraphChecks
from tests.checkpoints import CheckpointCache
from tests.e5m2_cache import answers_over_e5m2_cache
from tests.engine.test_e4m3_cache import with_scales
from tests.npu.engines import ONE_CHUNK, SHARED, TWO_BLOCKS, Job, run
from tests.quantized_checkpoints import Recipe, make_quantized_checkpoint

# So coarse that tokens depend on the rounding, and on which scale is whose.
SCALES = ((64.0, 32.0), (32.0, 256.0), (128.0, 16.0))


def amplify_attention(path: Path) -> None:
    """Multiply the outputs of attention by 32, in the checkpoint and in its plain copy."""
    names = {path: "o_proj.weight_scale_inv", path / "plain": "o_proj.weight"}
    for folder, name in names.items():
        (file,) = folder.glob("*.safetensors")
        tensors = load_file(file)
        for key in tensors:
            if key.endswith(name):
                tensors[key] = tensors[key] * 32
        save_file(tensors, file, {"format": "pt"})


@pytest.mark.engine
def test_tokens_are_those_of_rounded_keys_and_values(tmp_path: Path) -> None:
    recipe = Recipe(format="fp8", block=(32, 64))
    path = make_quantized_checkpoint(
        "llama", tmp_path / "fp8", recipe, max_position_embeddings=4096
    )
    amplify_attention(path)
    job = Job(
        with_scales(path, SCALES),
        {"kv_cache_dtype": "fp8"},
        [[ONE_CHUNK, TWO_BLOCKS], [SHARED]],
        reference=path / "plain",
        cache_scales=SCALES,
    )
    ran = run([job], tmp_path / "npu")
    assert ran.answers == [job.expected()]
    assert ran.calls("copy_kv"), "the last prompt begins as the one before"
    ops = {tuple(arguments) for call in ran.calls("compile") for _, arguments in call["sdk_ops"]}
    dtypes = {arguments[-1] for arguments in ops if len(arguments) > 1}
    assert dtypes == {"torch.float8_e4m3fn"}
    for swapped in (tuple((v, k) for k, v in SCALES), ()):
        other = Job(path, batches=job.batches, reference=path / "plain", cache_scales=swapped)
        assert other.expected() != job.expected()


@pytest.mark.engine
def test_e5m2_answers_as_rounded_so(tmp_path: Path) -> None:
    """Cold and over a bundle; wrong where the bytes are read as e4m3. The weights are float32:
    vLLM refuses this cache for FP8 checkpoints.
    """
    sizes = {"max_position_embeddings": 4096}
    recipe = Recipe(format="fp8", block=(32, 64))
    path = make_quantized_checkpoint("llama", tmp_path / "fp8", recipe, **sizes)
    amplify_attention(path)
    ones = ((1.0, 1.0),) * len(SCALES)
    options = {"kv_cache_dtype": "fp8_e5m2"}
    job = Job(path / "plain", options, [[ONE_CHUNK, TWO_BLOCKS], [SHARED]])
    expected = [
        answers_over_e5m2_cache(job.checkpoint, batch, job.max_tokens, ones)
        for batch in job.batches
    ]
    cold = run([job], tmp_path / "npu")
    assert cold.answers == [expected]
    bundle = tmp_path / "bundle"
    write_folder(bundle, collect(tmp_path / "npu" / "cache", GraphChecks()))
    elsewhere = run([job], tmp_path / "host", rbln={"cache_bundles": [str(bundle)]})
    assert elsewhere.answers == [expected]
    broken = run([job], tmp_path / "npu", **{"break": ["cache_dtype"]})
    assert broken.answers != [expected]
    assert all(call["hit"] for warm in (elsewhere, broken) for call in warm.calls("compile"))


def config_of(checkpoint: Path, **options: Any) -> VllmConfig:
    return EngineArgs(
        str(checkpoint),
        kv_cache_dtype="fp8",
        max_num_batched_tokens=128,
        additional_config={"rbln": {"device": "rebel"}},
        **options,
    ).create_engine_config()


@pytest.mark.parametrize(
    ("window", "length", "message"),
    [
        (64, 4096, "a window of 64"),
        (None, 1024, "--block-size 1024 for a context of 1024 tokens"),
        (None, 4096, None),
        (4096, 4096, None),
    ],
)
def test_other_ops_than_that_of_causal_attention_over_blocks_are_refused(
    sdk: ModuleType,
    checkpoints: CheckpointCache,
    window: int | None,
    length: int,
    message: str | None,
) -> None:
    assert sdk
    config = config_of(checkpoints("llama", max_position_embeddings=4096), max_model_len=length)
    with set_current_vllm_config(config):
        if message is None:
            RblnAttentionImpl(4, 32, 1.0, 2, None, window, "fp8")
            return
        with pytest.raises(UnsupportedModelError, match=f"--kv-cache-dtype fp8, {message}"):
            RblnAttentionImpl(4, 32, 1.0, 2, None, window, "fp8")
