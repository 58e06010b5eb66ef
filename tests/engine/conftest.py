"""Engines over tiny checkpoints: real vLLM, our platform, the emulated device, in this process."""

import gc
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.multiprocess import MultiProcessCollector

from rbln_backend.vllm_patches import inspect_models_here
from tests.checkpoints import CheckpointCache
from tests.graph_cache import graph_cache, trace_once
from tests.kernel_cache import share_kernels

# The engine core runs in the test's process, so that a test can step it and look inside.
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

# Small shapes with every kind of boundary: 4 blocks of 16 per chunk, 3 chunk buckets, 3 batch
# buckets, and a context of four chunks.
DEFAULTS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "block_size": 16,
    "seed": 0,
    "disable_log_stats": True,
}


@dataclass
class Engine:
    """One ``LLM`` and the directory of its metrics."""

    llm: Any
    run_dir: Path
    checkpoint: Path

    @property
    def core(self) -> Any:
        return self.llm.llm_engine.engine_core.engine_core

    def metric(self, name: str, **labels: str) -> float:
        """A sample of the engine's metrics board, 0 when it has none."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self.run_dir / "metrics"))
        return registry.get_sample_value(name, labels) or 0.0

    def total(self, name: str, **labels: str) -> float:
        """The sum over every label set that has ``labels``."""
        registry = CollectorRegistry()
        MultiProcessCollector(registry, path=str(self.run_dir / "metrics"))
        return sum(
            sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def generate(self, prompts: list[list[int]], params: Any) -> list[Any]:
        inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: list[Any] = self.llm.generate(inputs, params, use_tqdm=False)
        return outputs

    def kv_caches(self) -> list[Any]:
        layers = self.core.vllm_config.compilation_config.static_forward_context
        return [layer.kv_cache for layer in layers.values() if hasattr(layer, "kv_cache")]

    def used_blocks(self) -> int:
        pool = self.core.scheduler.kv_cache_manager.block_pool
        # The null block is never free.
        return int(pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())


@dataclass
class Engines:
    """Makes engines and keeps those without a private cache root for the whole session."""

    checkpoints: CheckpointCache
    root: Path
    _kept: dict[str, Engine] = field(default_factory=dict)
    _made: int = 0

    def __call__(self, arch: str = "llama", **overrides: Any) -> Engine:
        key = repr((arch, sorted(overrides.items())))
        if key not in self._kept:
            self._kept[key] = self.fresh(arch, **overrides)
        return self._kept[key]

    def fresh(
        self,
        arch: str = "llama",
        *,
        rbln: dict[str, Any] | None = None,
        checkpoint: Path | None = None,
        **overrides: Any,
    ) -> Engine:
        """A new engine; ``rbln`` are fields of ``RblnConfig``, ``checkpoint`` replaces ``arch``."""
        from vllm import LLM
        from vllm.distributed import destroy_model_parallel

        if self._made == 0:
            _collect_seldom()
            inspect_models_here()
            trace_once()
        self._made += 1
        run_dir = self.root / f"run-{self._made}"
        run_dir.mkdir()
        checkpoint = checkpoint or self.checkpoints(arch)
        # One thread: on a busy machine two of them wait for each other at every small kernel.
        options = {"cache_root": str(graph_cache()), "run_dir": str(run_dir), "num_threads": 1}
        options |= rbln or {}
        share_kernels(Path(options["cache_root"]))
        # vLLM makes the groups that the process's first model needs; experts need one more.
        destroy_model_parallel()
        llm = LLM(str(checkpoint), additional_config={"rbln": options}, **(DEFAULTS | overrides))
        return Engine(llm, run_dir, checkpoint)


def _collect_seldom() -> None:
    """Freeze what is imported: vLLM collects garbage several times per engine, 1 s each.

    A traced graph is a hundred thousand objects: the default collects every 700.
    """
    import rbln_backend.worker.worker  # noqa: F401

    gc.collect()
    gc.freeze()
    # The end of an engine would thaw all.
    setattr(gc, "unfreeze", lambda: None)  # noqa: B010
    gc.set_threshold(50_000, 20, 20)


@pytest.fixture(scope="session")
def engines(
    checkpoints: CheckpointCache, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engines]:
    yield Engines(checkpoints, tmp_path_factory.mktemp("engines"))
