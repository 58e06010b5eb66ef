"""The memory of an NPU that KV caches get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from torch import nn

from rbln_backend.compiler.sdk.limits import LARGEST_NUM_BLOCKS
from rbln_backend.compiler.sdk.npu import Npu, RankMemory
from rbln_backend.errors import DeviceMemoryError
from rbln_backend.kv_cache.layout import MIB
from rbln_backend.kv_cache.specs import LayerSpec, WindowSpec, window_in
from rbln_backend.vllm_compat.surface import VllmConfig, configured
from rbln_backend.worker.startup.preflight import start_graphs
from rbln_backend.worker.startup.skeleton import weight_bytes


def rank_memory(npu: Npu, config: VllmConfig) -> RankMemory:
    """Return the memory of one rank of the engine that ``config`` describes."""
    rbln = configured(config)
    graphs = start_graphs(config)
    return RankMemory(
        npu,
        devices=rbln.num_devices_per_local_rank,
        num_graphs=len(graphs),
        num_kv_heads=config.model_config.get_num_kv_heads(config.parallel_config),
    )


def npu_budget_bytes(
    npu: Npu,
    config: VllmConfig,
    model: nn.Module,
    specs: Iterable[LayerSpec],
    slot_bytes: int = 0,
) -> int:
    """Return the bytes of KV caches on one rank, at most those of ``LARGEST_NUM_BLOCKS``.

    ``slot_bytes``: of adapters. Raises ``DeviceMemoryError`` if nothing is left.
    """
    memory, utilization = rank_memory(npu, config), config.cache_config.gpu_memory_utilization
    weights = weight_bytes(model)
    budget = memory.kv_budget_bytes(utilization, weights, slot_bytes)
    if budget <= 0:
        raise DeviceMemoryError(
            f"KV cache: nothing is left of {memory.total_bytes // MIB} MiB of {npu.name} "
            f"(--gpu-memory-utilization {utilization:.2f}, weights {weights // MIB} MiB, "
            f"{memory.num_graphs} graphs {memory.runtime_bytes // MIB} MiB, adapter slots "
            f"{memory.adapter_bytes(slot_bytes) // MIB} MiB); use more ranks or fewer buckets"
        )
    smallest = _smallest_group_bytes(specs)
    return min(budget, LARGEST_NUM_BLOCKS * smallest) if smallest else budget


def _smallest_group_bytes(specs: Iterable[LayerSpec]) -> int:
    """Return the bytes of a block in the smallest group that vLLM may form; 0 without pages."""
    by_kind: Counter[int | None] = Counter()
    for spec in specs:
        if not isinstance(spec, WindowSpec):
            by_kind[window_in(spec)] += spec.page_size_bytes
    return min(by_kind.values(), default=0)
