"""Memory: the plan of a server on this host or NPU, and what the KV caches of a rank get."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import psutil
from torch import nn
from vllm.config import VllmConfig

from rbln_backend.devices.emulated.packing import can_pack, fits_in_place, packed_shape
from rbln_backend.devices.rebel.limits import LARGEST_NUM_BLOCKS, Npu, RankMemory
from rbln_backend.errors import DeviceMemoryError
from rbln_backend.host.resources import HostMemory, host_memory
from rbln_backend.kv_cache.layout import (
    MIB,
    explicit_budget_bytes,
    free_budget_bytes,
    kv_budget_bytes,
    num_partitions,
)
from rbln_backend.kv_cache.plan import paged_bytes_per_block, window_bytes
from rbln_backend.kv_cache.specs import LayerSpec, WindowSpec, window_in
from rbln_backend.reports.info import MemoryReport
from rbln_backend.settings import configured
from rbln_backend.worker.preflight import Preflight, planned_graphs, sampler_graphs, weight_bytes

_MIB = 1 << 20
# Tensors of the hidden and of the intermediate size that a step holds at once, per token.
_HIDDEN_ROWS, _INTERMEDIATE_ROWS = 6, 3


def memory_report(preflight: Preflight, memory: HostMemory | None = None) -> MemoryReport:
    """Return the plan; its problems name what does not fit and the flag to change."""
    npu, config = preflight.capabilities.npu, preflight.config
    specs, lora_bytes = list(preflight.specs.values()), 0
    if config.lora_config is not None:
        # vLLM's part of it takes a while to import.
        from rbln_backend.lora.model_manager import slot_bytes

        skeleton, linear_only = preflight.skeleton, not preflight.capabilities.runs_on_host
        lora_bytes = slot_bytes(
            skeleton.model, config.lora_config, skeleton.item_bytes, linear_only=linear_only
        )
    block_bytes = paged_bytes_per_block(specs)
    shared: dict[str, Any] = {
        "weight_bytes": preflight.skeleton.weight_bytes,
        "window_bytes": window_bytes(specs, config.scheduler_config.max_num_seqs),
        "block_tokens": config.cache_config.block_size,
        "num_blocks": 0,
        "max_model_len": config.model_config.max_model_len,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
    }
    if npu is None:
        memory = memory or host_memory()
        planned = MemoryReport(
            total_bytes=memory.total_bytes,
            available_bytes=memory.available_bytes,
            source=memory.source,
            # This process has imported what an engine imports.
            process_bytes=psutil.Process(os.getpid()).memory_info().rss,
            packing_bytes=packing_bytes(preflight.skeleton.model),
            lora_bytes=lora_bytes,
            workspace_bytes=_workspace_bytes(preflight),
            block_bytes=block_bytes,
            **shared,
        )
        return _with_blocks(planned, config)
    # All NPUs of an engine together, by the vendor's figures.
    parallel, rank = config.parallel_config, rank_memory(npu, config)
    total = rank.total_bytes * parallel.world_size
    planned = MemoryReport(
        total_bytes=total,
        available_bytes=total,
        source=f"{parallel.world_size * rank.devices} x {npu.name}, by name",
        process_bytes=0,
        packing_bytes=0,
        # Each tensor-parallel rank has A or B of a layer as a whole.
        lora_bytes=rank.adapter_bytes(lora_bytes) * parallel.tensor_parallel_size,
        workspace_bytes=rank.runtime_bytes * parallel.world_size,
        block_bytes=block_bytes * rank.kv_copies,
        **shared,
    )
    return _with_npu_blocks(planned, config)


def _with_npu_blocks(planned: MemoryReport, config: VllmConfig) -> MemoryReport:
    """Add the blocks of an NPU's KV cache, or the problem: they get all that utilisation leaves."""
    cache = config.cache_config
    fixed = planned.weight_bytes + planned.lora_bytes + planned.workspace_bytes
    if fixed > planned.total_bytes:
        return replace(planned, problems=(_weights_problem(planned, fixed),))
    if not planned.block_bytes:
        return planned
    flag, most = "--gpu-memory-utilization", int(planned.total_bytes * cache.gpu_memory_utilization)
    num_blocks = max(0, most - fixed - planned.window_bytes) // planned.block_bytes
    num_blocks = min(num_blocks, LARGEST_NUM_BLOCKS)
    if cache.num_gpu_blocks_override is not None:
        flag, num_blocks = "--num-gpu-blocks-override", cache.num_gpu_blocks_override
    elif cache.kv_cache_memory_bytes is not None:
        flag, num_blocks = (
            "--kv-cache-memory-bytes",
            max(0, cache.kv_cache_memory_bytes - planned.window_bytes) // planned.block_bytes,
        )
    return _checked(replace(planned, num_blocks=num_blocks), fixed, flag)


def packing_bytes(model: nn.Module) -> int:
    """Return the bytes that packed weights take beyond the weights' own.

    A weight that is also read unpacked (an embedding that is the LM head) is kept beside its packed
    form, and one that needs padding grows. Experts in NVFP4 are kept in bytes.
    """
    owners = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    extra = 0
    for layer in model.modules():
        # Their module is imported with vLLM's expert layers, for quantised checkpoints alone.
        count = getattr(getattr(layer, "quant_method", None), "packing_bytes", None)
        extra += 0 if count is None else count(layer)
    for parameter in model.parameters():
        weight = parameter.data
        if not can_pack(weight):
            continue
        packed = math.prod(packed_shape(weight.dtype, *weight.shape)) * weight.element_size()
        if owners[id(parameter)] > 1:
            extra += packed
        elif not fits_in_place(weight):
            extra += packed - weight.nbytes
    return extra


def _workspace_bytes(preflight: Preflight) -> int:
    """Return roughly the bytes of the largest step's tensors and of its logits in float32."""
    config = preflight.config.model_config
    tokens = max(max(table.sizes) for table in preflight.tables.values())
    hidden = config.get_hidden_size()
    wide = getattr(config.hf_text_config, "intermediate_size", None) or 4 * hidden
    # Gemma-3n has one intermediate size for each layer.
    wide = max(wide) if isinstance(wide, list) else wide
    row = (_HIDDEN_ROWS * hidden + _INTERMEDIATE_ROWS * wide) * preflight.skeleton.item_bytes
    rows = preflight.config.scheduler_config.max_num_seqs
    return tokens * row + rows * config.get_vocab_size() * (preflight.skeleton.item_bytes + 4)


def _with_blocks(planned: MemoryReport, config: VllmConfig) -> MemoryReport:
    """Add the blocks of the KV cache as the worker computes them, or the problem."""
    fixed = planned.process_bytes + planned.weight_bytes + planned.packing_bytes
    fixed += planned.lora_bytes + planned.workspace_bytes
    if fixed > planned.available_bytes:
        return replace(planned, problems=(_weights_problem(planned, fixed),))
    if not planned.block_bytes:
        return planned
    override = config.cache_config.num_gpu_blocks_override
    if override is not None:
        return _checked(replace(planned, num_blocks=override), fixed, "--num-gpu-blocks-override")
    explicit = config.cache_config.kv_cache_memory_bytes
    figures: dict[str, Any] = {
        "total_bytes": planned.total_bytes,
        "available_bytes": planned.available_bytes - fixed,
        "utilization": config.cache_config.gpu_memory_utilization,
        "used_bytes": fixed,
        "window_bytes": planned.window_bytes,
    }
    try:
        if explicit is not None:
            budget = explicit_budget_bytes(explicit, planned.block_bytes, planned.window_bytes)
            sized = replace(planned, num_blocks=budget // planned.block_bytes)
            return _checked(sized, fixed, "--kv-cache-memory-bytes")
        budget = kv_budget_bytes(
            bytes_per_block=planned.block_bytes,
            blocks_per_request=num_partitions(planned.max_model_len, planned.block_tokens),
            max_num_seqs=planned.max_num_seqs,
            **figures,
        )
    except DeviceMemoryError as error:
        free = free_budget_bytes(**figures)
        longest = (free // planned.block_bytes - 1) * planned.block_tokens
        fits = f" It fits with --max-model-len {longest}." if longest > 0 else ""
        return replace(planned, problems=(f"{error}{fits}",))
    return replace(planned, num_blocks=budget // planned.block_bytes)


def _weights_problem(planned: MemoryReport, fixed: int) -> str:
    return (
        f"without any KV cache it needs about {fixed // _MIB:,} MiB, of which "
        f"{planned.weight_bytes // _MIB:,} MiB are weights, but {planned.source} leaves "
        f"{planned.available_bytes // _MIB:,} MiB: give it more memory, split it with "
        "--tensor-parallel-size, or serve a quantized or smaller checkpoint"
    )


def _checked(planned: MemoryReport, fixed: int, flag: str) -> MemoryReport:
    """Add a problem if the size set with ``flag`` does not fit, or is below one longest request."""
    left = planned.available_bytes - fixed
    if planned.kv_bytes > left:
        most = max(0, left - planned.window_bytes)
        value = most // planned.block_bytes if "blocks" in flag else left
        return replace(
            planned,
            problems=(
                f"{flag} asks for {planned.kv_bytes // _MIB:,} MiB of KV cache, but "
                f"{left // _MIB:,} MiB are left: lower it to {value}",
            ),
        )
    if (planned.longest_requests or 0.0) < 1.0:
        longest = max(0, planned.num_blocks - 1) * planned.block_tokens
        return replace(
            planned,
            problems=(
                f"{flag} gives {planned.num_blocks} blocks, too few for one request of "
                f"{planned.max_model_len} tokens: raise it, or lower --max-model-len to {longest}",
            ),
        )
    return planned


def rank_memory(npu: Npu, config: VllmConfig) -> RankMemory:
    """Return the memory of one rank of the engine that ``config`` describes."""
    rbln = configured(config)
    planned = planned_graphs(config)
    return RankMemory(
        npu,
        devices=rbln.num_devices_per_local_rank,
        num_graphs=len(planned) + len(sampler_graphs(config, planned)),
        num_kv_heads=config.model_config.get_num_kv_heads(config.parallel_config),
    )


def host_budget_bytes(
    config: VllmConfig, model: nn.Module, ranks: int, bytes_per_block: int, for_windows: int
) -> int:
    """Return the bytes of the paged KV caches of one of ``ranks`` on this host.

    ``for_windows``: bytes of window layers' caches. Raises ``DeviceMemoryError`` if too few are
    left.
    """
    cache, length = config.cache_config, config.model_config.max_model_len
    explicit = cache.kv_cache_memory_bytes
    if explicit is not None:
        return explicit_budget_bytes(explicit, bytes_per_block, for_windows)
    memory = host_memory()
    # Packing needs memory for one more weight: an embedding that is also the LM head is kept in
    # both layouts, and a weight that needs padding is copied.
    for_packing = max((weight.nbytes for weight in model.parameters()), default=0)
    return kv_budget_bytes(
        total_bytes=memory.total_bytes // ranks,
        available_bytes=memory.available_bytes // ranks - for_packing,
        utilization=cache.gpu_memory_utilization,
        used_bytes=psutil.Process(os.getpid()).memory_info().rss + for_packing,
        bytes_per_block=bytes_per_block,
        blocks_per_request=num_partitions(length, cache.block_size),
        max_num_seqs=config.scheduler_config.max_num_seqs,
        window_bytes=for_windows,
    )


def npu_budget_bytes(
    npu: Npu, config: VllmConfig, model: nn.Module, specs: Iterable[LayerSpec], slot_bytes: int = 0
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
    # Of a block in the smallest group that vLLM may form; 0 without pages.
    by_kind: Counter[int | None] = Counter()
    for spec in specs:
        if not isinstance(spec, WindowSpec):
            by_kind[window_in(spec)] += spec.page_size_bytes
    smallest = min(by_kind.values(), default=0)
    return min(budget, LARGEST_NUM_BLOCKS * smallest) if smallest else budget
