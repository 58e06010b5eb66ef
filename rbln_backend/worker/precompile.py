"""Precompilation: an engine's start up to its compiled graphs, which fills the store."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import nn
from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.worker_base import CompilationTimes

from rbln_backend.config import RblnConfig
from rbln_backend.devices.emulated.build import NATIVE, build_variants, buildable_levels
from rbln_backend.devices.port import device_capabilities
from rbln_backend.errors import ConfigError
from rbln_backend.kv_cache.layout import num_partitions
from rbln_backend.kv_cache.plan import paged_bytes_per_block
from rbln_backend.reports.info import CompileReport
from rbln_backend.settings import configured
from rbln_backend.worker.check import check_length, kv_cache_configs
from rbln_backend.worker.graph_factory import Result
from rbln_backend.worker.worker import RblnWorker

_WORKER = "rbln_backend.worker.precompile.CompileWorker"


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
    return CompileReport.of_ranks(rbln.cache_root, filled, kernels)


def _check(config: VllmConfig, rbln: RblnConfig) -> None:
    switches = {
        "VLLM_DISABLE_COMPILE_CACHE": rbln.disable_compile_cache,
        "VLLM_RBLN_CACHE_READ_ONLY": rbln.cache_read_only,
    }
    for name, is_on in switches.items():
        if is_on:
            raise ConfigError(f"compile fills the store, but {name} is set; unset it here")
    check_length(config)


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
    ordered = [name for name in (NATIVE.name, *levels) if name in chosen]
    build_variants(Path(rbln.cache_root), ordered)
    return ordered


class NoWeightsLoader(BaseModelLoader):
    """Leaves the weights as allocated: graphs do not depend on their values.

    Pages are backed by memory when they are first written, so these weights take none.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        """Do nothing."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Do nothing."""


class CompileWorker(RblnWorker):
    """An ``RblnWorker`` up to the compiled graphs, with the smallest KV cache that vLLM accepts."""

    _filled: tuple[dict[str, Result], list[str]] | None = None

    def _loader(self) -> BaseModelLoader:
        assert self._compiler is not None
        # The SDK may compile weights into its binaries; our own programs only name them.
        if not self._compiler.capabilities.runs_on_host:
            return super()._loader()
        return NoWeightsLoader(self.load_config)

    def determine_available_memory(self) -> int:
        """Return the bytes of one longest request: programs do not depend on the number of blocks.

        The binaries of an NPU's compiler do.
        """
        assert self._compiler is not None
        if self._compiler.capabilities.stores_binaries:
            return super().determine_available_memory()
        specs = list(self._layer_specs().values())
        blocks = num_partitions(self.model_config.max_model_len, self.cache_config.block_size)
        per_block = paged_bytes_per_block(specs)
        return (blocks + 2) * per_block if per_block else self._window_pool_bytes(specs)

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Fill the store; ``filled_store`` returns the result."""
        assert self._build is not None
        with self._progress.reporting_failure():
            self._filled = self._build.fill_store(self._progress)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def filled_store(self) -> tuple[dict[str, Result], list[str]]:
        assert self._filled is not None
        return self._filled
