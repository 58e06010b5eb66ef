"""The KV caches' share of an NPU's memory; host memory says nothing of it."""

from __future__ import annotations

from torch import nn

from rbln_backend.compiler.sdk.npu import Npu, kv_budget_bytes
from rbln_backend.errors import DeviceMemoryError
from rbln_backend.kv_cache.layout import MIB
from rbln_backend.vllm_compat.surface import VllmConfig, configured
from rbln_backend.worker.graphs.warmup_plan import plan
from rbln_backend.worker.startup.preflight import bucket_tables, generates


def npu_budget_bytes(npu: Npu, config: VllmConfig, model: nn.Module) -> int:
    """Bytes for KV caches on one rank. Raises ``DeviceMemoryError`` where nothing is left."""
    rbln, cache = configured(config), config.cache_config
    weight_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
    graphs = plan(bucket_tables(config, rbln), has_logits=generates(config))
    budget = kv_budget_bytes(
        npu,
        devices=rbln.num_devices_per_local_rank,
        utilization=cache.gpu_memory_utilization,
        weight_bytes=weight_bytes,
        num_graphs=len(graphs),
        num_kv_heads=config.model_config.get_num_kv_heads(config.parallel_config),
    )
    if budget <= 0:
        raise DeviceMemoryError(
            f"KV cache: nothing is left of {npu.memory_bytes // MIB} MiB of {npu.name} "
            f"(--gpu-memory-utilization {cache.gpu_memory_utilization:.2f}, weights "
            f"{weight_bytes // MIB} MiB, {len(graphs)} graphs); use more ranks or fewer buckets"
        )
    return budget
