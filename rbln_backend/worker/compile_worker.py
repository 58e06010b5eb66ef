"""A rank that fills the store with graphs and ends: no weights, no first runs, no requests."""

from __future__ import annotations

from torch import nn

from rbln_backend.kv_cache.layout import num_partitions
from rbln_backend.kv_cache.plan import paged_bytes_per_block
from rbln_backend.vllm_compat.surface import BaseModelLoader, CompilationTimes, ModelConfig
from rbln_backend.worker.engine_build import FilledStore
from rbln_backend.worker.worker import RblnWorker


class NoWeightsLoader(BaseModelLoader):
    """Leaves the weights as they were allocated: graphs do not depend on their values.

    The operating system lends memory on first use, so that weights nobody writes take none.
    """

    def download_model(self, model_config: ModelConfig) -> None:
        """Nothing to download."""

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Nothing to read."""


class CompileWorker(RblnWorker):
    """As ``RblnWorker`` up to the compiled graphs, with the smallest KV cache that vLLM takes."""

    _filled: FilledStore | None = None

    def _loader(self) -> BaseModelLoader:
        assert self._compiler is not None
        # What the SDK makes of a weight is not known here; our own programs only name them.
        if not self._compiler.capabilities.runs_on_host:
            return super()._loader()
        return NoWeightsLoader(self.load_config)

    def determine_available_memory(self) -> int:
        """Bytes for one longest request: programs do not depend on the number of blocks.

        What an NPU's compiler makes of them does.
        """
        assert self._compiler is not None
        if self._compiler.compiles_when_loading:
            return super().determine_available_memory()
        specs = list(self.get_kv_cache_spec().values())
        blocks = num_partitions(self.model_config.max_model_len, self.cache_config.block_size)
        per_block = paged_bytes_per_block(specs)
        if per_block:
            return (blocks + 2) * per_block
        # Window layers alone: see RblnWorker.
        nominal = sum(spec.page_size_bytes for spec in specs)
        return (self.scheduler_config.max_num_seqs + 1) * nominal

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Fill the store; ``filled_store`` tells what came of it."""
        assert self._build is not None
        with self._progress.telling_failure():
            self._filled = self._build.fill_store(self._progress)
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def filled_store(self) -> FilledStore:
        """What ``compile_or_warm_up_model`` did."""
        assert self._filled is not None
        return self._filled
