"""An estimate of the seconds that an engine's start takes, from the sizes that they depend on."""

from __future__ import annotations

from pathlib import Path

from rbln_backend.config import RblnConfig
from rbln_backend.reporting.start_costs import StartCosts
from rbln_backend.vllm_compat.surface import VllmConfig
from rbln_backend.worker.startup.preflight import start_graphs

_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt")


class StartEstimate:
    """The expected seconds of each phase of one rank's start, from those of earlier starts."""

    def __init__(self, config: VllmConfig, rbln: RblnConfig) -> None:
        model, parallel = config.model_config, config.parallel_config
        graphs = start_graphs(config)
        self._sizes = (
            _weight_bytes(Path(model.model)) // parallel.world_size,
            len(graphs),
            model.get_total_num_hidden_layers() // parallel.pipeline_parallel_size,
        )
        names = (model.model, str(model.dtype), model.max_model_len, [str(g) for g in graphs])
        self.costs = StartCosts(Path(rbln.cache_root), (*names, parallel.world_size))

    @property
    def weight_bytes(self) -> int:
        """Bytes of this rank's weights in a local checkpoint, 0 if it is not fetched yet."""
        return self._sizes[0]

    def phases_s(self, *, builds_kernels: bool) -> dict[str, float]:
        """Return the expected seconds by phase, `init` first."""
        init = self.costs.kernels_s() if builds_kernels else 0.0
        return {"init": init, **self.costs.phases_s(*self._sizes)}


def _weight_bytes(folder: Path) -> int:
    """Return the bytes of a local checkpoint, 0 for one that is not fetched yet."""
    files = (path for pattern in _WEIGHT_FILES for path in folder.glob(pattern))
    return sum(path.stat().st_size for path in files)
