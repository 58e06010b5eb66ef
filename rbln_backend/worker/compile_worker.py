"""The worker of `rbln-serve compile`: compiles graphs into the store, without weights or runs."""

from __future__ import annotations

from torch import nn

from rbln_backend.kv_cache.layout import num_partitions
from rbln_backend.kv_cache.plan import paged_bytes_per_block
from rbln_backend.vllm_compat.surface import BaseModelLoader, CompilationTimes, ModelConfig
from rbln_backend.worker.engine_build import FilledStore
from rbln_backend.worker.worker import RblnWorker


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

    _filled: FilledStore | None = None

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
        if self._compiler.compiles_when_loading:
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

    def filled_store(self) -> FilledStore:
        """Return the result of ``compile_or_warm_up_model``."""
        assert self._filled is not None
        return self._filled
