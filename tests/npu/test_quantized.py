"""Quantised weights that the SDK's forms do not have: refused on an NPU by name, or expanded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.kernels.linear import MPLinearLayerConfig
from vllm.scalar_type import scalar_types

from rbln_backend.errors import UnsupportedModelError
from rbln_backend.graphs.bundles import collect, write_folder
from rbln_backend.layers.attention import RblnAttentionImpl
from rbln_backend.layers.quantized_linear import ByteWeights, RblnByteScheme, RblnWna16LinearKernel
from server.commands.cache import GraphChecks
from tests.checkpoints import CheckpointCache
from tests.e4m3_inputs import answers_over_e4m3_inputs
from tests.e5m2_cache import answers_over_e5m2_cache
from tests.engine.test_quantized import with_scales
from tests.npu.engines import ONE_CHUNK, SHARED, TWO_BLOCKS, WHOLE_CHUNK, Job, beside, run
from tests.npu.test_engines import YARN_OVER_LONG
from tests.quantized_checkpoints import Format, Recipe, make_quantized_checkpoint
from tests.reference import reference_generate

MODELOPT: tuple[Format, ...] = ("modelopt", "modelopt-mixed")


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


def test_blocks_of_fp8_are_taken(sdk: ModuleType) -> None:
    assert sdk
    stored = ByteWeights(is_float=True, scope="block", block=(128, 128))
    with set_current_vllm_config(on("rebel")):
        RblnByteScheme(stored, "layers.0.o_proj")


def test_w8a8_is_named_where_it_is_done(sdk: ModuleType) -> None:
    assert sdk
    stored = ByteWeights(is_float=True, scope="block", block=(128, 128), published="FP8 W8A8")
    for device, name in (
        ("rebel", "W8A8 FP8 group 128"),
        ("emulated", "W8A16 FP8 group 128 (published as FP8 W8A8)"),
    ):
        config = VllmConfig(additional_config={"rbln": {"device": device, "use_w8a8": True}})
        with set_current_vllm_config(config):
            assert str(RblnByteScheme(stored, "layers.0.o_proj").weights) == name


def fp8_llama(tmp_path: Path) -> Path:
    recipe, sizes = Recipe(format="fp8", block=(32, 64)), {"max_position_embeddings": 4096}
    return make_quantized_checkpoint("llama", tmp_path / "fp8", recipe, **sizes)


@pytest.mark.engine
@pytest.mark.wide
def test_blocks_of_fp8_answer_as_their_float32_copy(tmp_path: Path) -> None:
    path = fp8_llama(tmp_path)
    job = Job(path, batches=[[ONE_CHUNK], [ONE_CHUNK]], reference=path / "plain")
    ran = run([job], tmp_path / "npu")
    assert ran.answers == [job.expected()]
    given = {x["dtype"] for call in ran.calls("compile") for x in call["inputs"]}
    assert "float8_e4m3fn" in given, "weights stay bytes on the device"


def with_swapped_scales(path: Path) -> Path:
    """Make a plain copy whose queries have the scales of values, and the reverse."""
    copy = shutil.copytree(path / "plain", path / "swapped")
    (stored,), (plain,) = (x.glob("*.safetensors") for x in (path, copy))
    scales, tensors = load_file(stored), load_file(plain)
    for name in list(tensors):
        if name.endswith("q_proj.weight"):
            other = name.replace("q_proj", "v_proj")
            ratio = scales[f"{other}_scale"] / scales[f"{name}_scale"]
            tensors[name], tensors[other] = tensors[name] * ratio, tensors[other] / ratio
    save_file(tensors, plain, {"format": "pt"})
    return copy


@pytest.mark.engine
@pytest.mark.wide
def test_modelopt_fp8_answers_as_its_float32_copy(tmp_path: Path) -> None:
    """Of all layers, and of those that a checkpoint of mixed precision lists."""
    sizes = {"max_position_embeddings": 4096}
    recipes = [Recipe(format=x, block=(0, 0), static=True) for x in MODELOPT]
    paths = [
        make_quantized_checkpoint("llama", tmp_path / recipe.format, recipe, **sizes)
        for recipe in recipes
    ]
    jobs = [Job(path, batches=[[ONE_CHUNK]], reference=path / "plain") for path in paths]
    ran = run(jobs, tmp_path / "npu")
    assert ran.answers == [job.expected() for job in jobs]
    swapped = replace(jobs[0], reference=with_swapped_scales(paths[0]))
    assert swapped.expected() != ran.answers[0]
    given = {x["dtype"] for call in ran.calls("compile") for x in call["inputs"]}
    assert "float8_e4m3fn" in given, "weights stay bytes on the device"


@pytest.mark.engine
@pytest.mark.parametrize("form", ["op", pytest.param("native", marks=pytest.mark.wide)])
def test_experts_of_fp8_answer_as_their_float32_copy(tmp_path: Path, form: str) -> None:
    recipe = Recipe(format="fp8", block=(32, 64), skipped=("mlp.gate",))
    sizes = {"max_position_embeddings": 4096, "moe_intermediate_size": 128}
    path = make_quantized_checkpoint("qwen3_moe", tmp_path / "fp8", recipe, **sizes)
    job = Job(path, batches=[[ONE_CHUNK]], reference=path / "plain")
    rbln = {} if form == "op" else {"moe_use_opt_kernel": False, "moe_custom_kernel": False}
    ran = run([job], tmp_path / "npu", rbln=rbln)
    assert ran.answers == [job.expected()]
    ops = {name for call in ran.calls("compile") for name, _ in call["sdk_ops"]}
    name = "rbln_custom_ops::custom_moe_glu_group_dequantize"
    assert (name in ops) == (form == "op")


@pytest.mark.engine
@pytest.mark.wide
def test_switched_on_inputs_of_fp8_experts_are_bytes(tmp_path: Path) -> None:
    recipe = Recipe(format="fp8", block=(32, 64), skipped=("mlp.gate",))
    # With two layers the rounded inputs change no token.
    sizes = {"max_position_embeddings": 4096, "moe_intermediate_size": 128, "num_hidden_layers": 3}
    path = make_quantized_checkpoint("qwen3_moe", tmp_path / "fp8", recipe, **sizes)
    job = Job(path, batches=[[ONE_CHUNK, WHOLE_CHUNK]], reference=path / "plain")
    expected = answers_over_e4m3_inputs(path / "plain", job.batches[0], job.max_tokens, 64)
    ran = run([job], tmp_path / "npu", rbln={"use_w8a8": True})
    assert ran.answers == [[expected]] != [job.expected()]
    ops = {name for call in ran.calls("compile") for name, _ in call["sdk_ops"]}
    assert "rbln_custom_ops::custom_moe_glu_w8a8" in ops


@pytest.mark.engine
def test_gpt_oss_as_published_answers_as_its_float32_copy(tmp_path: Path) -> None:
    sizes = {"max_position_embeddings": 4096, "intermediate_size": 64}
    path = make_quantized_checkpoint(
        "gpt_oss",
        tmp_path / "mxfp4",
        Recipe(format="mxfp4"),
        rope_parameters=YARN_OVER_LONG,
        **sizes,
    )
    job = Job(path, batches=[[ONE_CHUNK]], reference=path / "plain")
    ran = run([job], tmp_path / "npu")
    assert ran.answers == [job.expected()]
    ops = {name for call in ran.calls("compile") for name, _ in call["sdk_ops"]}
    assert "rbln_custom_ops::custom_moe_glu_mxfp4" in ops
    # Sinks have the axes of the op when they come to the graph.
    given = [x for call in ran.calls("compile") for x in call["inputs"] if "sinks" in x["name"]]
    assert {tuple(x["shape"][1:]) for x in given} == {(1,)}


@pytest.fixture(scope="module")
def nvfp4(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = Recipe(format="nvfp4", group_size=16, skipped=("self_attn", "mlp.gate"))
    sizes = {"max_position_embeddings": 4096, "moe_intermediate_size": 128}
    path = tmp_path_factory.mktemp("nvfp4")
    return make_quantized_checkpoint("qwen3_moe", path, recipe, **sizes)


@pytest.mark.engine
@pytest.mark.wide
def test_nvfp4_experts_answer_as_their_float32_copy(nvfp4: Path, tmp_path: Path) -> None:
    job = Job(nvfp4, batches=[[ONE_CHUNK]], reference=nvfp4 / "plain")
    ran = run([job], tmp_path / "npu")
    assert ran.answers == [job.expected()]
    ops = {name for call in ran.calls("compile") for name, _ in call["sdk_ops"]}
    assert "rbln_custom_ops::custom_moe_glu_group_dequantize" in ops
    given = {x["dtype"] for call in ran.calls("compile") for x in call["inputs"]}
    assert {"uint8", "float8_e4m3fn"} <= given, "weights stay fields on the device"
    broken = run([job], tmp_path / "broken", **{"break": ["nibbles"]})
    assert broken.answers != ran.answers


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize("is_divided", [False, True], ids=["tensor", "expert"])
def test_two_ranks_share_nvfp4_experts(nvfp4: Path, tmp_path: Path, is_divided: bool) -> None:
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": is_divided}
    job = Job(nvfp4, options, [[ONE_CHUNK, WHOLE_CHUNK]], reference=nvfp4 / "plain")
    ran = run([job], tmp_path, devices=2)
    assert ran.answers == [job.expected()]


@pytest.mark.engine
@pytest.mark.wide
@pytest.mark.parametrize("ranks", [1, 2])
def test_nvfp4_experts_in_bfloat16(nvfp4: Path, tmp_path: Path, ranks: int) -> None:
    """Up to the first token of which float32 is not sure."""
    options = {"dtype": "bfloat16", "tensor_parallel_size": ranks}
    prompts = [ONE_CHUNK, WHOLE_CHUNK]
    ran = run([Job(nvfp4, options, [prompts], 24)], tmp_path, devices=2)
    compared = 0
    for prompt, tokens in zip(prompts, ran.answers[0][0], strict=True):
        wanted = reference_generate(nvfp4 / "plain", prompt, len(tokens))
        unsure = [place for place, margin in enumerate(wanted.margins) if margin < 0.2]
        end = (unsure or [len(tokens)])[0]
        assert tokens[:end] == wanted.token_ids[:end]
        compared += end
    assert compared > 8
    given = {x["dtype"] for call in ran.calls("compile") for x in call["inputs"]}
    assert "bfloat16" in given


@pytest.mark.engine
@pytest.mark.wide
def test_switched_on_inputs_of_linear_layers_are_scaled(tmp_path: Path) -> None:
    """As theirs, which are not rounded: the answer is the same."""
    path = fp8_llama(tmp_path)
    job = Job(path, batches=[[ONE_CHUNK]], reference=path / "plain")
    ran = run([job], tmp_path / "npu", rbln={"use_w8a8": True})
    assert ran.answers == [job.expected()]
    clamps = [sum(n for op, n in x["ops"].items() if "clamp" in op) for x in ran.calls("compile")]
    assert max(clamps) > 0


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


# ---------------------------------------------------------------------------------------- fp8 cache
# KV caches of 8-bit floats over the double: as transformers over rounded keys and values.


# So coarse that tokens depend on the rounding, and on which scale is whose.
SCALES = ((64.0, 32.0), (32.0, 256.0))


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
    path = fp8_llama(tmp_path)
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
@pytest.mark.wide
def test_e5m2_answers_as_rounded_so(tmp_path: Path) -> None:
    """Cold and over a bundle; wrong where the bytes are read as e4m3. The weights are float32:
    vLLM refuses this cache for FP8 checkpoints.
    """
    path = fp8_llama(tmp_path)
    amplify_attention(path)
    ones = ((1.0, 1.0),) * len(SCALES)
    options = {"kv_cache_dtype": "fp8_e5m2"}
    job = Job(path / "plain", options, [[ONE_CHUNK, TWO_BLOCKS], [SHARED]])
    expected = [
        answers_over_e5m2_cache(job.checkpoint, batch, job.max_tokens, ones)
        for batch in job.batches
    ]
    root, bundle = tmp_path / "cache", tmp_path / "bundle"
    stored = {"cache_root": str(root)}
    cold = run([job], tmp_path / "npu", rbln=stored)
    assert cold.answers == [expected]
    write_folder(bundle, collect(root, GraphChecks()))
    elsewhere = run([job], tmp_path / "host", rbln=beside(bundle, tmp_path / "host"))
    assert elsewhere.answers == [expected]
    broken = run([job], tmp_path / "npu", rbln=stored, **{"break": ["cache_dtype"]})
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
