"""The vLLM platform: what vLLM asks of a device before any worker exists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from rbln_backend.config import RblnConfig
from rbln_backend.envs import resolve
from rbln_backend.errors import ConfigError, UnsupportedModelError

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)

# Defaults of the command line: a chunk that keeps the time between tokens short, and a batch
# whose buckets compile in seconds. Measured on 2 cores; every flag overrides its default.
DEFAULT_CHUNK_TOKENS = 256
DEFAULT_MAX_NUM_SEQS = 32
DEFAULT_BLOCK_SIZE = 128


class RblnPlatform(Platform):
    """RBLN NPUs, real or emulated. Tensors of the host side are CPU tensors in both cases."""

    _enum = PlatformEnum.OOT
    # vLLM builds a torch.device from this name.
    device_name: str = "cpu"
    device_type: str = "cpu"
    dispatch_key: str = "CPU"
    dist_backend: str = "gloo"
    ray_device_key: str = ""
    device_control_env_var: str = "RBLN_VISIBLE_DEVICES"
    # Nothing is compiled on the side: "eager" keeps vLLM's small helpers out of Inductor.
    simple_compile_backend: str = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """None of vLLM's own kernels: they are built for one CPU level and may not run here."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """The native implementation of vLLM's IR operators is what gets captured."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "rbln"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        import psutil

        return int(psutil.virtual_memory().total)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """The host is the only torch device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """``torch.manual_seed`` already covers the host."""

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """bfloat16, float16 and float32 all have kernels."""

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """KV caches are bound by layer name, so equal layer indices do not collide."""

    @classmethod
    def get_attn_backend_cls(cls, selected_backend: Any, *args: Any, **kwargs: Any) -> str:
        selector = args[0] if args else kwargs.get("attn_selector_config")
        if getattr(selector, "use_mla", False):
            raise UnsupportedModelError("MLA attention is not supported by the RBLN backend")
        if getattr(selector, "use_sparse", False):
            raise UnsupportedModelError("sparse attention is not supported by the RBLN backend")
        return "rbln_backend.attention.backend.RblnAttentionBackend"

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        if parser is not None:
            parser.set_defaults(
                max_num_batched_tokens=DEFAULT_CHUNK_TOKENS, max_num_seqs=DEFAULT_MAX_NUM_SEQS
            )

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        rbln = _resolve_config(vllm_config)
        _refuse_unsupported(vllm_config, rbln)
        _set_classes(vllm_config)
        _set_compilation(vllm_config)
        _set_shapes(vllm_config)
        model = _model_config(vllm_config)
        if rbln.enforce_model_fp32 and model is not None:
            model.dtype = torch.float32

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """The block size is settled in ``check_and_update_config``."""


def _model_config(vllm_config: VllmConfig) -> ModelConfig | None:
    """None while vLLM makes configurations without a model, whatever its annotation says."""
    return vllm_config.model_config


def _resolve_config(vllm_config: VllmConfig) -> RblnConfig:
    """Resolve once, store the result where every worker finds it, and say what was ignored."""
    additional = vllm_config.additional_config
    if not isinstance(additional, dict):
        raise ConfigError(f"additional_config must be a mapping, got {type(additional).__name__}")
    resolved = resolve(additional)
    for warning in resolved.warnings:
        logger.warning_once(warning)
    additional["rbln"] = resolved.config.to_dict()
    return resolved.config


def _refuse_unsupported(vllm_config: VllmConfig, rbln: RblnConfig) -> None:
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    model_parallel = (
        parallel.world_size > 1
        or parallel.data_parallel_size > 1
        or parallel.enable_expert_parallel
    )
    if model_parallel and rbln.profiler:
        raise RuntimeError(
            "RBLN_PROFILER is not supported when using vLLM model parallel (TP, DP, EP, or PP)."
        )
    if not scheduler.enable_chunked_prefill:
        raise ConfigError(
            "Disabling chunked prefill is not supported on RBLN. Please enable chunked prefill."
        )
    reasons = {
        "tensor, pipeline, data or expert parallelism": model_parallel,
        "LoRA adapters (--enable-lora)": vllm_config.lora_config is not None,
        "speculative decoding": vllm_config.speculative_config is not None,
        "KV transfer between engines": vllm_config.kv_transfer_config is not None,
    }
    model = _model_config(vllm_config)
    if model is not None:
        reasons |= {
            "pooling models": model.runner_type != "generate",
            "multimodal inputs": model.is_multimodal_model,
            "encoder-decoder models": model.is_encoder_decoder,
            "state-space (hybrid Mamba) models": model.is_hybrid or model.is_attention_free,
        }
    for feature, present in reasons.items():
        if present:
            raise UnsupportedModelError(f"{feature}: not supported by the RBLN backend")


def _set_classes(vllm_config: VllmConfig) -> None:
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.worker_cls == "auto":
        parallel.worker_cls = "rbln_backend.worker.worker.RblnWorker"
    if scheduler.scheduler_cls is None:
        scheduler.scheduler_cls = "rbln_backend.scheduler.scheduler.RblnScheduler"
    parallel.disable_custom_all_reduce = True
    scheduler.async_scheduling = False


def _set_compilation(vllm_config: VllmConfig) -> None:
    """Switch vLLM's own compilation off: the whole model is captured as one graph instead."""
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.cudagraph_capture_sizes = []
    compilation.custom_ops = ["none"]
    compilation.ir_enable_torch_wrap = False
    model = _model_config(vllm_config)
    if model is not None:
        model.disable_cascade_attn = True


def _set_shapes(vllm_config: VllmConfig) -> None:
    """Block size and chunk: a chunk longer than the context would only ever be padding."""
    cache, scheduler = vllm_config.cache_config, vllm_config.scheduler_config
    if not cache.user_specified_block_size:
        cache.block_size = DEFAULT_BLOCK_SIZE
    model = _model_config(vllm_config)
    if model is None:
        return
    longest = max(model.max_model_len, scheduler.max_num_seqs)
    if scheduler.max_num_batched_tokens > longest:
        scheduler.max_num_batched_tokens = longest
