"""Precompilation: an engine's start up to its compiled graphs, which fills the store."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rbln_backend.attention.backend import RblnAttentionBackend
from rbln_backend.compiler.device import device_capabilities
from rbln_backend.config import RblnConfig
from rbln_backend.emulator.targets import NATIVE, buildable_levels
from rbln_backend.emulator.variants import build_variants
from rbln_backend.errors import ConfigError
from rbln_backend.reporting.store_report import CompileReport
from rbln_backend.vllm_compat.surface import (
    Executor,
    KVCacheConfig,
    KVCacheSpec,
    VllmConfig,
    configured,
    get_kv_cache_configs,
    get_supported_kv_cache_layouts,
    register_all_kvcache_specs,
    resolve_kv_cache_layout,
)

_WORKER = "rbln_backend.worker.compile_worker.CompileWorker"


def compile_model(config: VllmConfig, targets: Sequence[str]) -> CompileReport:
    """Compile the graphs of ``config``, and kernels for ``targets``, into the store.

    ``targets`` are levels of CPUs, ``native`` or ``all``; none: the kernels of this host.
    Raises ``ConfigError`` if nothing can be stored, and the errors of a start.
    """
    rbln = configured(config)
    _check(config, rbln)
    kernels = _build_kernels(rbln, targets)
    config.parallel_config.worker_cls = _WORKER
    executor = Executor.get_class(config)(config)
    try:
        specs = executor.get_kv_cache_specs()
        available = executor.determine_available_memory() if any(specs) else [0] * len(specs)
        executor.initialize_from_config(kv_cache_configs(config, specs, available))
        executor.compile_or_warm_up_model()
        filled = executor.collective_rpc("filled_store")
    finally:
        executor.shutdown()
    ranks = [(dict(results), list(missing)) for results, missing in filled]
    return CompileReport.of_ranks(rbln.cache_root, ranks, kernels)


def kv_cache_configs(
    config: VllmConfig, specs: Sequence[Mapping[str, KVCacheSpec]], available: Sequence[int]
) -> list[KVCacheConfig]:
    """Return the KV cache groups of every rank, formed from ``specs`` by rank as vLLM does."""
    register_all_kvcache_specs(config)
    # vLLM's engine resolves it before it forms groups; our caches do not use it.
    layouts = [layout.name for layout in get_supported_kv_cache_layouts([RblnAttentionBackend])]
    resolve_kv_cache_layout(config, [layouts], [s for rank in specs for s in rank.values()])
    configs: Any = get_kv_cache_configs(config, [dict(spec) for spec in specs], list(available))
    return list(configs)


def _check(config: VllmConfig, rbln: RblnConfig) -> None:
    switches = {
        "VLLM_DISABLE_COMPILE_CACHE": rbln.disable_compile_cache,
        "VLLM_RBLN_CACHE_READ_ONLY": rbln.cache_read_only,
    }
    for name, is_on in switches.items():
        if is_on:
            raise ConfigError(f"compile fills the store, but {name} is set; unset it here")
    check_length(config)


def check_length(config: VllmConfig) -> None:
    """Raise ``ConfigError`` if the graphs would depend on the memory of the host."""
    if config.model_config.original_max_model_len == -1:
        raise ConfigError(
            "--max-model-len auto takes what fits into the memory of the host that serves; name a "
            "length, so that graphs made here are the ones needed there"
        )


def _build_kernels(rbln: RblnConfig, names: Sequence[str]) -> list[str]:
    """Build the kernels ``names``; without any the worker builds what it lacks, as in a server."""
    if not names:
        return []
    levels = [level.name for level in buildable_levels()]
    known = [NATIVE.name, "all", *levels]
    for name in names:
        if name not in known:
            raise ConfigError(f"--isa {name!r} is unknown; known: {', '.join(known)}")
    capabilities = device_capabilities(rbln)
    if not capabilities.runs_on_host:
        raise ConfigError(
            f"--isa builds kernels of the emulated device; the device is {capabilities.device!r}"
        )
    chosen = {*names, *levels} if "all" in names else set(names)
    wanted = [name for name in (NATIVE.name, *levels) if name in chosen]
    build_variants(Path(rbln.cache_root), wanted)
    return wanted
