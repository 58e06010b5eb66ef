"""`RblnPlatform`: vLLM's platform interface, called before any worker exists."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from vllm.logger import init_logger
from vllm.platforms.interface import Platform, PlatformEnum

from rbln_backend import vllm_patches
from rbln_backend.buckets import (
    DEFAULT_CHUNK_TOKENS,
    DEFAULT_MAX_NUM_SEQS,
    EngineBuckets,
    get_step_tokens,
)
from rbln_backend.config import RANKS_EXECUTOR, RblnConfig
from rbln_backend.devices.port import Capabilities, device_capabilities
from rbln_backend.devices.rebel import limits
from rbln_backend.devices.rebel.limits import check_release, settle_npu
from rbln_backend.errors import ConfigError
from rbln_backend.kv_cache.layout import reuse_unit
from rbln_backend.kv_transfer.options import take_tiers
from rbln_backend.limits import (
    LORA_DTYPE,
    LORA_EXPERT_FORMATS,
    LORA_ON_NPU,
    LORA_TARGET,
    MLA,
    PREFILL_PROMPTS,
    SPARSE_ATTENTION,
)
from rbln_backend.models import register as register_text_models
from rbln_backend.refusals import (
    model_config,
    pools,
    refuse_first,
    refuse_unsupported,
    settle_compilation,
)
from rbln_backend.settings import (
    EngineSettings,
    largest_decode,
    newer_sdk,
    options_of_vllm,
    resolve,
)
from rbln_backend.speculation.model_rules import settle_draft_model

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig


logger = init_logger(__name__)

DEFAULT_BLOCK_SIZE = 128
NPU_CHUNK_TOKENS = 512
"""Default of SDK 0.12.1; the parser does not know the device yet."""
# At most 15 tokens of a shared prompt are computed again; hashing and logging cost nothing visible.
DEFAULT_REUSE_UNIT = 16
DEFAULT_PREFILL_PROMPTS = 8

# Compiles schemas, regular expressions, grammars and the tags of tool calls.
GRAMMAR_BACKEND: Literal["xgrammar"] = "xgrammar"

_NOT_ADAPTED = ("embed_tokens",)


class RblnPlatform(Platform):
    """RBLN NPUs, real or emulated. Host tensors are CPU tensors in both cases."""

    _enum = PlatformEnum.OOT
    # vLLM builds a torch.device from this name.
    device_name: str = "cpu"
    device_type: str = "cpu"
    dispatch_key: str = "CPU"
    dist_backend: str = "gloo"
    ray_device_key: str = "RBLN"
    device_control_env_var: str = "RBLN_VISIBLE_DEVICES"
    # "eager" keeps vLLM's small helpers out of Inductor.
    simple_compile_backend: str = "eager"

    @classmethod
    def import_kernels(cls) -> None:
        """Import none of vLLM's kernels: they are built for one CPU level and may not run here."""

    @classmethod
    def import_ir_kernels(cls) -> None:
        """Import none: the native implementation of vLLM's IR operators is captured."""

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return "rbln"

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        from rbln_backend.host.resources import host_memory

        return host_memory().total_bytes

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Do nothing: the host is the only torch device."""

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seed what an NPU draws tokens from; ``torch.manual_seed`` covers the host."""
        # Loaded where graphs are compiled by it.
        if (sdk := sys.modules.get("rebel")) is not None:
            sdk.manual_seed(seed)

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return False

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Accept bfloat16, float16 and float32: all have kernels."""

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Register quantisation methods before vLLM reads a checkpoint's quantisation config."""
        from rbln_backend.layers.quantization import register

        register()

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def register_custom_kv_cache_specs(cls, vllm_config: VllmConfig) -> None:
        from rbln_backend.kv_cache.managers import register_specs

        register_specs()

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Accept equal layer indices: KV caches are bound by layer name."""

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        from vllm.v1.attention.backend import AttentionType

        # First: sparse attention is also MLA.
        if attn_selector_config.use_sparse:
            raise SPARSE_ATTENTION.refusal()
        if attn_selector_config.use_mla:
            raise MLA.refusal()
        if attn_selector_config.attn_type == AttentionType.ENCODER_ONLY:
            return "rbln_backend.layers.encoder.EncoderAttentionBackend"
        return "rbln_backend.layers.attention.RblnAttentionBackend"

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return "rbln_backend.layers.communicator.RblnCommunicator"

    @classmethod
    def get_nixl_supported_devices(cls) -> dict[str, tuple[str, ...]]:
        """Return the buffers of vLLM's name of the device, which is ``cpu`` for NPUs, too."""
        return {cls.device_type: ("cpu",)}

    @classmethod
    def get_nixl_memory_type(cls) -> str:
        return "DRAM"

    @classmethod
    def discover_numa_topology(cls) -> list[list[int]]:
        """Return no core: vLLM's NIXL worker would move the thread that computes to the last."""
        return []

    @classmethod
    def get_punica_wrapper(cls) -> str:
        return "rbln_backend.lora.layers.RblnPunicaWrapper"

    @classmethod
    def pre_register_and_update(cls, parser: FlexibleArgumentParser | None = None) -> None:
        register_text_models()
        vllm_patches.inspect_models_here()
        vllm_patches.speculate_here()
        vllm_patches.schedule_in_order()
        vllm_patches.run_here()
        later = newer_sdk() is not None
        if later:
            vllm_patches.chunk_by_default(NPU_CHUNK_TOKENS)
        if parser is not None:
            parser.set_defaults(
                max_num_batched_tokens=NPU_CHUNK_TOKENS if later else DEFAULT_CHUNK_TOKENS,
                max_num_seqs=DEFAULT_MAX_NUM_SEQS,
                # vLLM leaves it off for some poolers, and then rejects chunks below the context.
                enable_chunked_prefill=True,
            )

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        if not isinstance(vllm_config.additional_config, EngineSettings):
            settle_compilation(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        rbln, others = _read_settings(vllm_config)
        _settle_model(vllm_config)
        refuse_unsupported(vllm_config, rbln)
        _set_classes(vllm_config)
        _set_compilation(vllm_config)
        device = device_capabilities(rbln)
        if device.npu is not None and not isinstance(vllm_config.additional_config, EngineSettings):
            check_release(vllm_config, rbln)
        rbln = _settle_shapes(vllm_config, rbln, device)
        if device.npu is not None:
            rbln = settle_npu(vllm_config, rbln, device.npu)
        model = model_config(vllm_config)
        if rbln.enforce_model_fp32 and model is not None:
            model.dtype = torch.float32
        _settle_lora(vllm_config, rbln)
        _settle_grammars(vllm_config)
        # vLLM does not pass this number to engines of dense models.
        engines = max(1, vllm_config.parallel_config.data_parallel_size_local)
        buckets = _settle_buckets(vllm_config, rbln)
        vllm_config.additional_config = EngineSettings(rbln, engines, others, buckets)

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: VllmConfig) -> None:
        """Do nothing: ``check_and_update_config`` settles the block size."""


def _read_settings(vllm_config: VllmConfig) -> tuple[RblnConfig, Mapping[str, Any]]:
    """Return our settings and vLLM's entries of `additional_config`; log warnings."""
    additional = vllm_config.additional_config
    if isinstance(additional, EngineSettings):
        # vLLM builds a configuration again from a settled one.
        return additional.rbln, additional.others
    if not isinstance(additional, dict):
        raise ConfigError(f"additional_config must be a mapping, got {type(additional).__name__}")
    resolved = resolve(additional)
    for warning in resolved.warnings:
        logger.warning_once(warning)
    return take_tiers(vllm_config, resolved.config), options_of_vllm(additional)


def _settle_model(vllm_config: VllmConfig) -> None:
    """Pass on a field of Llama-4; gather chunks for poolers, and switch prefix caching off."""
    model, tuning = model_config(vllm_config), "attn_temperature_tuning"
    if model is None:
        return
    if getattr(model.hf_text_config, tuning, None):
        # The attention beyond 8192 tokens: vLLM reads the field only from the generation config,
        # where published checkpoints lack it.
        model.override_generation_config.setdefault(tuning, True)
    if model.runner_type != "pooling":
        return
    if not model.is_chunked_prefill_supported:
        # vLLM's runner passes such a pooler the prompt in one step; ours gathers its chunks.
        vllm_config.scheduler_config.enable_chunked_prefill = True
    if model.attn_type == "encoder_only":
        # Attention in both directions needs the whole prompt in one chunk.
        vllm_config.scheduler_config.max_num_batched_tokens = model.max_model_len
    if vllm_config.cache_config.enable_prefix_caching and not model.is_prefix_caching_supported:
        vllm_config.cache_config.enable_prefix_caching = False
        logger.warning("Prefix caching is off: this model's pooler reads every token of a prompt")


def _settle_lora(vllm_config: VllmConfig, rbln: RblnConfig) -> None:
    """Reject adapters that the slots cannot hold; make adapters compute in the model's dtype."""
    lora, model = vllm_config.lora_config, model_config(vllm_config)
    if lora is None or model is None:
        return
    refuse_first(
        {
            LORA_TARGET: any(name in _NOT_ADAPTED for name in lora.target_modules or ()),
            LORA_EXPERT_FORMATS: lora.enable_moe_shared_loras or lora.enable_mixed_moe_lora_format,
            LORA_DTYPE: lora.lora_dtype != model.dtype and not rbln.enforce_model_fp32,
        }
    )
    device = device_capabilities(rbln)
    if not device.runs_on_host:
        targets = [f"--lora-target-modules {name}" for name in lora.target_modules or ()]
        settings = {
            "device 'rebel' without torch-rbln": not device.copies_caches,
            "VLLM_RBLN_ENABLE_WARM_UP=0": not rbln.enable_warm_up,
            **{target: target.endswith(("experts", "lm_head")) for target in targets},
        }
        LORA_ON_NPU.refuse(settings, "--enable-lora")
    assert isinstance(model.dtype, torch.dtype)
    lora.lora_dtype = model.dtype


def _settle_grammars(vllm_config: VllmConfig) -> None:
    """Settle the one grammar backend of all requests; vLLM would use the first request's."""
    grammars = vllm_config.structured_outputs_config
    if grammars.backend == "auto":
        grammars.backend = GRAMMAR_BACKEND
    if grammars.backend != GRAMMAR_BACKEND:
        raise ConfigError(
            f"--structured-outputs-config.backend must be auto or {GRAMMAR_BACKEND}, the one "
            f"grammar backend of this platform, got {grammars.backend!r}"
        )


def _set_classes(vllm_config: VllmConfig) -> None:
    """Set worker, scheduler, executors of one process and of one host, and what ranks exchange."""
    parallel, scheduler = vllm_config.parallel_config, vllm_config.scheduler_config
    if parallel.worker_cls == "auto":
        parallel.worker_cls = "rbln_backend.worker.worker.RblnWorker"
    if scheduler.scheduler_cls is None:
        name = "RblnAsync" if scheduler.async_scheduling else "Rbln"
        scheduler.scheduler_cls = f"rbln_backend.scheduler.scheduler.{name}Scheduler"
    if parallel.distributed_executor_backend == "uni":
        parallel.distributed_executor_backend = "rbln_backend.worker.executor.DirectExecutor"
    elif parallel.distributed_executor_backend == "mp":
        parallel.distributed_executor_backend = RANKS_EXECUTOR
    parallel.disable_custom_all_reduce = True
    if parallel.use_sequence_parallel_moe:
        # Each tensor-parallel rank that shares experts with other engines is given all rows. vLLM
        # would split them: less to gather, but batch sizes that depend on the number of ranks.
        # The backend's name has no other effect here: our layers do the exchange.
        parallel.all2all_backend = "flashinfer_nvlink_two_sided"


def _set_compilation(vllm_config: VllmConfig) -> None:
    """Switch vLLM's compilation off: the whole model is captured as one graph."""
    from vllm.config import CompilationMode, CUDAGraphMode

    compilation = vllm_config.compilation_config
    compilation.mode = CompilationMode.NONE
    compilation.cudagraph_mode = CUDAGraphMode.NONE
    compilation.cudagraph_capture_sizes = []
    compilation.custom_ops = ["none"]
    compilation.ir_enable_torch_wrap = False
    model = model_config(vllm_config)
    if model is not None:
        model.disable_cascade_attn = True


def _settle_shapes(vllm_config: VllmConfig, rbln: RblnConfig, device: Capabilities) -> RblnConfig:
    """Settle block size, chunk, unit of prefix reuse, and cost and prompts of a prefill step."""
    cache, scheduler, npu = vllm_config.cache_config, vllm_config.scheduler_config, device.npu
    model = model_config(vllm_config)
    if not cache.user_specified_block_size:
        cache.block_size = DEFAULT_BLOCK_SIZE if npu is None else limits.DEFAULT_BLOCK_SIZE
    if model is not None:
        # A chunk is at most as long as the context.
        longest = max(model.max_model_len, scheduler.max_num_seqs)
        if npu is not None:
            longest = limits.fitting_chunk(cache.block_size, longest)
        scheduler.max_num_batched_tokens = min(scheduler.max_num_batched_tokens, longest)
    # A chunk that starts inside a block crosses into the next one; an NPU may not support that.
    chunk = scheduler.max_num_batched_tokens
    unit = reuse_unit(
        wanted=rbln.sub_block_size,
        default=DEFAULT_REUSE_UNIT if npu is None else chunk,
        block_size=cache.block_size,
        enabled=rbln.sub_block_cache,
    )
    step_tokens = rbln.prefill_step_tokens
    if step_tokens is None:
        # Of an NPU the fixed cost of a step is unknown; the emulated device's kernels skip padding.
        ranks = vllm_config.parallel_config.data_parallel_size
        step_tokens = chunk
        if npu is None and (rbln.kernels == "aten" or ranks > 1):
            experts = (0, 0)
            if model is not None:
                experts = (model.get_num_experts(), model.get_num_experts_per_tok())
            step_tokens = get_step_tokens(*experts)
    # A chunk of several prompts needs the emulated device's own ops.
    is_one = not device.runs_on_host or rbln.use_custom_kernel or pools(vllm_config)
    refuse_first({PREFILL_PROMPTS: is_one and rbln.chunk_prompts > 1})
    prompts = 1 if is_one else rbln.prefill_prompts or DEFAULT_PREFILL_PROMPTS
    return rbln.model_copy(
        update={
            "sub_block_size": unit,
            "prefill_step_tokens": step_tokens,
            # A prefill step has no more prompts than the largest decode step has requests.
            "prefill_prompts": min(prompts, largest_decode(vllm_config)),
        }
    )


def _settle_buckets(vllm_config: VllmConfig, rbln: RblnConfig) -> EngineBuckets | None:
    """Derive the compiled sizes; None without a model. Raises ``BucketError``."""
    model, speculation = model_config(vllm_config), vllm_config.speculative_config
    if model is None:
        return None
    return EngineBuckets.derive(
        rbln,
        vllm_config.scheduler_config.max_num_batched_tokens,
        None if model.runner_type == "pooling" else largest_decode(vllm_config),
        None if speculation is None else speculation.num_speculative_tokens,
        draft_model=settle_draft_model(vllm_config),
    )
