"""The shapes that an engine compiles for an NPU, where nothing else is configured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rbln_backend.compiler.sdk import limits
from rbln_backend.config import RblnConfig
from rbln_backend.errors import ConfigError
from rbln_backend.unsupported import MROPE
from rbln_backend.variables import later_rule, newer_sdk

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig

    from rbln_backend.compiler.sdk.npu import Npu


def settle_npu(vllm_config: VllmConfig, rbln: RblnConfig, npu: Npu) -> RblnConfig:
    """Settle one prefill shape, and one length of steps with drafts: each graph takes NPU memory.

    Raises ``ConfigError`` for shapes that the compiler rejects.
    """
    if rbln.use_custom_kernel:
        raise ConfigError(
            "use_custom_kernel (RBLN_USE_CUSTOM_KERNEL): these kernels are the vendor's own "
            "(vllm-rbln) and not part of this backend; unset it, or use device='emulated'"
        )
    # None in a configuration that vLLM makes without a model.
    model: ModelConfig | None = vllm_config.model_config
    chunk = vllm_config.scheduler_config.max_num_batched_tokens
    chunks = rbln.prefill_chunk_buckets or (chunk,)
    if model is not None and model.attn_type != "encoder_only":
        block_size = vllm_config.cache_config.block_size
        limits.check_block(block_size)
        limits.check_chunks(block_size, chunks)
        limits.check_num_blocks(vllm_config.cache_config.num_gpu_blocks_override or 0)
        assert rbln.sub_block_size is not None
        limits.check_reuse_unit(npu, rbln.sub_block_size, chunk)
    settled = {"prefill_chunk_buckets": chunks} | _verify_shapes(vllm_config, rbln)
    return rbln.model_copy(update=settled)


def check_release(vllm_config: VllmConfig, rbln: RblnConfig) -> None:
    """Raise ``ConfigError`` for settings that SDK 0.12.1 does not take, where it is installed.

    Call it while the block size and the chunk are as they were given.
    """
    model: ModelConfig | None = vllm_config.model_config
    version, cache = newer_sdk(), vllm_config.cache_config
    if version is None or model is None:
        return
    if model.uses_mrope:
        raise MROPE.refusal(f"RBLN SDK {version}, architecture {model.architecture!r}")
    devices, flag = rbln.num_devices_per_local_rank, "--max-num-batched-tokens"
    if devices > 1:
        name = "num_devices_per_local_rank"
        raise ConfigError(later_rule(name, f"{name}={devices}", version))
    if not cache.user_specified_block_size:
        raise ConfigError(later_rule("--block-size", "no --block-size", version))
    chunk = vllm_config.scheduler_config.max_num_batched_tokens
    if model.attn_type != "encoder_only" and chunk > cache.block_size:
        shown = f"{flag} {chunk}, --block-size {cache.block_size}"
        raise ConfigError(later_rule(flag, shown, version))


def _verify_shapes(vllm_config: VllmConfig, rbln: RblnConfig) -> dict[str, Any]:
    """Return one length at every decode bucket, as vllm-rbln 0.12 has it (``run_model_graphs``)."""
    speculation = vllm_config.speculative_config
    if speculation is None:
        return {}
    return {
        "verify_lengths": rbln.verify_lengths or (speculation.num_speculative_tokens + 1,),
        "verify_tokens": rbln.verify_tokens or vllm_config.scheduler_config.max_num_batched_tokens,
    }
