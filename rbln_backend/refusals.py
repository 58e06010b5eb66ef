"""Rejection of unsupported vLLM configurations, before any model is built or any rank exists.

vLLM compiles pieces of a model with Inductor and replays them as CUDA graphs. Here the whole model
is captured as one graph per bucket: flags that request compilation have no further effect, sizes to
compile become decode buckets, and all other flags of it are rejected by name.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from rbln_backend.buckets import MTP
from rbln_backend.config import RANKS_EXECUTOR, RblnConfig
from rbln_backend.devices.port import device_capabilities
from rbln_backend.errors import ConfigError
from rbln_backend.kv_cache.fp8 import FP8_DTYPES
from rbln_backend.kv_transfer.options import check_nixl, names_nixl
from rbln_backend.layers.schemes import METHODS, MODELOPT, check_modelopt
from rbln_backend.limits import (
    ASYNC_SCHEDULING,
    CONTEXT_PARALLEL,
    DEVICE_SAMPLING,
    DUAL_CHUNK_ATTENTION,
    ENCODER_DECODER,
    EXPERT_EXCHANGE,
    EXPERTS_APART,
    HOSTS,
    KV_DTYPE,
    KV_TIERS,
    LORA_EXPERTS_APART,
    LORA_SHARDS,
    MICRO_BATCHES,
    MULTIMODAL,
    OWN_LAUNCHER,
    QUANTIZATION,
    SPECULATION_KERNELS,
    SPECULATION_METHOD,
    SPECULATION_POOLING,
    SPECULATION_RANKS,
    SPECULATION_STAGES,
    STATE_SPACE,
    UNEQUAL_HEADS,
    Feature,
)
from rbln_backend.models import TEXT_MODELS
from rbln_backend.settings import EngineSettings, given_options, options_of_vllm
from rbln_backend.speculation.model_rules import check_draft_model
from rbln_backend.speculation.text_drafts import DRAFT_METHODS, DRAFT_MODELS, get_draft_model

if TYPE_CHECKING:
    from vllm.config import CacheConfig, CompilationConfig, ModelConfig, VllmConfig

logger = logging.getLogger(__name__)

_SIZES = "compile_sizes"
_GRAPH_SIZE = "max_cudagraph_capture_size"
_FLAG = "--compilation-config"
_NO_EAGER = "there is no eager path: every graph is compiled"


def settle_compilation(vllm_config: VllmConfig) -> None:
    """Convert the user's compilation settings; raises `ConfigError` for unsupported ones.

    Must run before vLLM fills in its own defaults.
    """
    from vllm.config import CompilationMode, CUDAGraphMode

    model = model_config(vllm_config)
    if model is not None:
        # First: for some unsupported models vLLM changes the compilation settings itself.
        refuse_model(model)
        if model.enforce_eager:
            raise ConfigError(f"--enforce-eager is not supported: {_NO_EAGER}")
    level = vllm_config.optimization_level
    if level == 0:
        raise ConfigError(f"--optimization-level 0 (-O0) is not supported: {_NO_EAGER}")
    if level == 1:
        logger.warning("-O1 has no effect: every graph is compiled as a whole, as for -O3")
    given = _changed(vllm_config.compilation_config)
    mode = given.pop("mode", CompilationMode.VLLM_COMPILE)
    if mode != CompilationMode.VLLM_COMPILE:
        name = f"{int(mode)} ({mode.name})"
        raise ConfigError(f"{_FLAG}: mode must be 3, got {name}: {_NO_EAGER}")
    if given.get("cudagraph_mode") == CUDAGraphMode.NONE:
        del given["cudagraph_mode"]
    if (sizes := given.pop(_SIZES, None)) is not None:
        vllm_config.compilation_config.compile_sizes = None
        _take_sizes(vllm_config, sizes)
    if (largest := given.pop(_GRAPH_SIZE, None)) is not None:
        # Some of vLLM's models set it themselves.
        logger.warning(
            "%s: %s=%s has no effect: there are no CUDA graphs", _FLAG, _GRAPH_SIZE, largest
        )
    for name, value in given.items():
        raise ConfigError(
            f"{_FLAG}: {name}={value!r} is not supported: the whole model is captured as one graph "
            "for each bucket, without Inductor or CUDA graphs"
        )


def _changed(given: CompilationConfig) -> dict[str, Any]:
    untouched = type(given)()
    names = [field.name for field in fields(given) if field.init]
    pairs = {name: (getattr(given, name), getattr(untouched, name)) for name in names}
    return {name: value for name, (value, default) in pairs.items() if value != default}


def _take_sizes(vllm_config: VllmConfig, sizes: list[Any]) -> None:
    """Make sizes to compile the decode buckets, together with the largest batch."""
    if not all(isinstance(size, int) and size > 0 for size in sizes):
        raise ConfigError(f"{_FLAG}: compile_sizes must be integers above 0, got {sizes!r}")
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        # Rejected when it is read.
        return
    given = given_options(additional)
    if taken := [name for name in given if name.startswith("decode_batch_bucket_")]:
        raise ConfigError(
            f"{_FLAG}: compile_sizes and {taken[0]} of --additional-config both set the decode "
            "buckets; give one of them"
        )
    stages = vllm_config.parallel_config.pipeline_parallel_size
    largest = vllm_config.scheduler_config.max_num_seqs // stages
    buckets = sorted({size for size in sizes if size < largest} | {largest})
    logger.warning("compile_sizes %s become the decode buckets %s", sizes, buckets)
    if above := [size for size in sizes if size > largest]:
        logger.warning("compile_sizes %s are left out: no decode step exceeds %d", above, largest)
    vllm_config.additional_config = options_of_vllm(additional) | {
        "rbln": given
        | {"decode_batch_bucket_strategy": "manual", "decode_batch_bucket_manual_buckets": buckets}
    }


def _check_ranks(config: VllmConfig, *, profiler: bool) -> None:
    """Raise ``UnsupportedModelError``, ``ConfigError`` or ``RuntimeError`` if it cannot run.

    The text for ``profiler`` is the one that the vendor documents.
    """
    parallel = config.parallel_config
    several = parallel.world_size > 1 or parallel.data_parallel_size > 1
    if (several or parallel.enable_expert_parallel) and profiler:
        raise RuntimeError(
            "RBLN_PROFILER is not supported when using vLLM model parallel (TP, DP, EP, or PP)."
        )
    lora = config.lora_config
    # Fewer local engines than data-parallel ranks, unless the user sets a rank.
    has_rank = parallel.data_parallel_rank_local is not None
    lacks_engines = not has_rank and parallel.data_parallel_size_local < parallel.data_parallel_size
    refuse_first(
        {
            OWN_LAUNCHER: parallel.distributed_executor_backend == "external_launcher",
            # The engine would wait for processes that neither we nor `--headless` start.
            HOSTS: parallel.nnodes > 1
            or parallel.local_engines_only
            or parallel.data_parallel_backend == "ray"
            or (lacks_engines and parallel.data_parallel_size_local < 1),
            EXPERTS_APART: lacks_engines and config.model_config.is_moe,
            MICRO_BATCHES: parallel.use_ubatching,
            LORA_SHARDS: lora is not None and lora.fully_sharded_loras,
            LORA_EXPERTS_APART: lora is not None
            and parallel.data_parallel_size > 1
            and "experts" in (lora.target_modules or ()),
        }
    )
    stages, number = parallel.pipeline_parallel_size, config.scheduler_config.max_num_seqs
    if number < stages:
        raise ConfigError(
            f"--max-num-seqs {number} is below --pipeline-parallel-size {stages}: every stage has "
            f"a step of max_num_seqs // stages requests; give at least {stages}"
        )
    if number % stages:
        logger.warning(
            "--max-num-seqs %d is no multiple of the %d pipeline stages: a step takes at most %d "
            "requests, so %d of them never run together with the others",
            number,
            stages,
            number // stages,
            number % stages,
        )


def model_config(vllm_config: VllmConfig) -> ModelConfig | None:
    """Return the model's configuration; None in a configuration that vLLM makes without a model."""
    return vllm_config.model_config


def pools(vllm_config: VllmConfig) -> bool:
    """Return True for an engine with a model that pools."""
    model = model_config(vllm_config)
    return model is not None and model.runner_type == "pooling"


def refuse_unsupported(vllm_config: VllmConfig, rbln: RblnConfig) -> None:
    """Raise for the first unsupported setting of the whole configuration."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    is_settled = isinstance(vllm_config.additional_config, EngineSettings)
    _check_ranks(vllm_config, profiler=rbln.profiler)
    refuse_first(
        {
            CONTEXT_PARALLEL: parallel.prefill_context_parallel_size > 1
            or parallel.decode_context_parallel_size > 1
        }
    )
    model, device = model_config(vllm_config), device_capabilities(rbln)
    if parallel.assigned_physical_gpu_ids and not is_settled:
        if device.npu is None:
            raise ConfigError("--device-ids: the emulated device has no numbers; drop the flag")
        if rbln.num_devices_per_local_rank > 1:
            raise ConfigError(
                "--device-ids names one NPU for each rank: with num_devices_per_local_rank="
                f"{rbln.num_devices_per_local_rank} use RBLN_VISIBLE_DEVICES"
            )
    if rbln.has_kv_tiers:
        algorithm = vllm_config.cache_config.prefix_caching_hash_algo
        KV_TIERS.refuse(
            {
                f"{parallel.world_size} ranks of an engine": parallel.world_size > 1,
                "device 'rebel' without torch-rbln": not device.copies_caches,
                f"architecture {model and model.architecture!r}": pools(vllm_config),
                f"--prefix-caching-hash-algo {algorithm}": not algorithm.startswith("sha256"),
            }
        )
    if names_nixl(vllm_config.kv_transfer_config):
        check_nixl(vllm_config, rbln)
    if vllm_config.speculative_config is not None:
        _check_speculation(vllm_config, rbln)
    if scheduler.async_scheduling and model is not None:
        _check_async_scheduling(vllm_config, rbln)
    if rbln.sample_on_device and model is not None:
        _check_device_sampling(vllm_config, rbln)
    if model is not None:
        refuse_model(model)
        if model.architecture in TEXT_MODELS and not rbln.disable_mm:
            raise MULTIMODAL.refusal(f"architecture {model.architecture!r}")
        _check_kv_dtype(vllm_config.cache_config, model, rbln)
        if model.is_moe:
            exchange = parallel.all2all_backend
            refuse_first(
                {EXPERT_EXCHANGE: not is_settled and exchange != "allgather_reducescatter"}
            )
            ranks = parallel.tensor_parallel_size * parallel.data_parallel_size
            if parallel.enable_expert_parallel and ranks == 1:
                logger.warning("--enable-expert-parallel has no effect: one rank has all experts")
        if rbln.use_w8a8 and not is_settled and device.packed_weights:
            logger.warning("use_w8a8 has no effect: the emulated device does not round inputs")
    # Last: vLLM switches it off itself for some unsupported models.
    if not scheduler.enable_chunked_prefill:
        raise ConfigError(
            "Disabling chunked prefill is not supported on RBLN. Please enable chunked prefill."
        )


def _check_speculation(vllm_config: VllmConfig, rbln: RblnConfig) -> None:
    """Raise for an unsupported combination with speculative decoding."""
    speculation, parallel = vllm_config.speculative_config, vllm_config.parallel_config
    model = model_config(vllm_config)
    assert speculation is not None
    if speculation.method not in (*DRAFT_METHODS, *DRAFT_MODELS):
        raise SPECULATION_METHOD.refusal(f"method {speculation.method!r}")
    refuse_first(
        {
            SPECULATION_KERNELS: rbln.use_custom_kernel,
            SPECULATION_POOLING: pools(vllm_config),
            SPECULATION_RANKS: parallel.data_parallel_size > 1
            and model is not None
            and model.is_moe,
        }
    )
    if parallel.pipeline_parallel_size > 1:
        stages = f"--pipeline-parallel-size {parallel.pipeline_parallel_size}"
        executor = parallel.distributed_executor_backend
        # vLLM's class of ERNIE 4.5 with tied embeddings has no stages, with drafts or without.
        draft = speculation.draft_model_config.architecture if speculation.method == MTP else None
        SPECULATION_STAGES.refuse(
            {
                f"{stages}, --distributed-executor-backend {executor}": executor
                not in (None, "mp", RANKS_EXECUTOR),
                f"{stages}, method {speculation.method!r} of {draft}": draft == "ErnieMTPModel",
            }
        )
    if get_draft_model(vllm_config) is not None:
        on_npu = not device_capabilities(rbln).general_attention
        check_draft_model(vllm_config, rbln, on_npu=on_npu)


def _check_async_scheduling(vllm_config: VllmConfig, rbln: RblnConfig) -> None:
    """Raise for an engine whose next step cannot be planned before the tokens of this one."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    settings = {
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "data-parallel experts": parallel.data_parallel_size > 1 and model.is_moe,
        "--speculative-config": vllm_config.speculative_config is not None,
        "--kv-transfer-config": vllm_config.kv_transfer_config is not None,
        "KV tiers": rbln.has_kv_tiers,
        "--runner pooling": model.runner_type == "pooling",
        "VLLM_RBLN_SAMPLER=0": not rbln.sampler and not device_capabilities(rbln).runs_on_host,
    }
    ASYNC_SCHEDULING.refuse(settings, "--async-scheduling")


def _check_device_sampling(vllm_config: VllmConfig, rbln: RblnConfig) -> None:
    """Raise for an engine whose tokens cannot be drawn on the device."""
    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    device = device_capabilities(rbln)
    settings = {
        f"device {device.device!r}": device.runs_on_host,
        "device 'rebel' without torch-rbln": not device.copies_caches,
        "VLLM_RBLN_SAMPLER=0": not rbln.sampler,
        "VLLM_RBLN_ENABLE_WARM_UP=0": not rbln.enable_warm_up,
        "--runner pooling": model.runner_type == "pooling",
        "--tensor-parallel-size": parallel.tensor_parallel_size > 1,
        "--pipeline-parallel-size": parallel.pipeline_parallel_size > 1,
        "data-parallel experts": parallel.data_parallel_size > 1 and model.is_moe,
    }
    DEVICE_SAMPLING.refuse(settings, "sample_on_device")


def _check_kv_dtype(cache: CacheConfig, model: ModelConfig, rbln: RblnConfig) -> None:
    """Raise unless all KV caches have the model's dtype, or all have the same 8-bit floats."""
    if cache.kv_cache_dtype_skip_layers:
        raise KV_DTYPE.refusal("--kv-cache-dtype-skip-layers")
    cache_dtype = cache.cache_dtype
    if cache_dtype in ("auto", str(model.dtype).removeprefix("torch.")):
        return
    has_cache = model.attn_type != "encoder_only" and not model.use_mla
    has_ops = cache_dtype != "fp8_e5m2" or not device_capabilities(rbln).general_attention
    if cache_dtype not in FP8_DTYPES or not has_cache or not has_ops:
        raise KV_DTYPE.refusal(f"--kv-cache-dtype {cache_dtype}")


def refuse_model(model: ModelConfig) -> None:
    """Raise for a model whose configuration alone shows that it cannot run."""
    refuse_first(
        {
            ENCODER_DECODER: model.is_encoder_decoder,
            MULTIMODAL: model.is_multimodal_model,
            STATE_SPACE: model.is_hybrid or model.is_attention_free,
            UNEQUAL_HEADS: _has_narrow_values(model),
            # Its rotary embedding looks for a GPU when the model is built.
            DUAL_CHUNK_ATTENTION: bool(
                getattr(model.hf_text_config, "dual_chunk_attention_config", None)
            ),
        }
    )
    if model.quantization not in (None, *METHODS):
        if model.quantization.startswith(MODELOPT):
            # Its file names what vLLM's name of the method does not say.
            check_modelopt(model.model_arch_config.quantization_config or {})
        raise QUANTIZATION.refusal(f"quantization {model.quantization!r}")


def _has_narrow_values(model: ModelConfig) -> bool:
    """Return whether values have another head size than keys, except in latent attention."""
    config = model.hf_text_config
    values = getattr(config, "v_head_dim", None)
    if values is None or getattr(config, "kv_lora_rank", None) is not None:
        # Read the size of keys only if needed: it raises where layers differ in it.
        return False
    return bool(values != getattr(config, "head_dim", values))


def refuse_first(present: Mapping[Feature, bool]) -> None:
    """Raise for the first feature that is present."""
    for feature, is_present in present.items():
        if is_present:
            raise feature.refusal()
