"""`CompileJob`: what a process beside the engine compiles, as a file of a folder of its own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rbln_backend.bucketing.engine_buckets import EngineBuckets
from rbln_backend.core import GraphSpec
from rbln_backend.vllm_compat.surface import VllmConfig

_FILE = "job.pickle"


@dataclass(frozen=True)
class CompileJob:
    """An engine's configuration with other sizes."""

    config: VllmConfig
    sizes: EngineBuckets
    known: Sequence[GraphSpec]
    """The engine's present graphs, whose binaries are stored."""

    def write(self, folder: Path) -> None:
        """Write the job into ``folder``, which no other user can enter."""
        (folder / _FILE).write_bytes(
            pickle.dumps(replace(self, config=_without_model(self.config)))
        )

    @classmethod
    def read(cls, folder: Path) -> CompileJob:
        """Return the job that ``write`` has left in ``folder``."""
        data = (folder / _FILE).read_bytes()
        job: CompileJob = pickle.loads(data)  # noqa: S301 (the engine's own folder)
        return job


def _without_model(config: VllmConfig) -> VllmConfig:
    """Return ``config`` as it was before a model registered its layers in it."""
    plain, compilation = copy.copy(config), copy.copy(config.compilation_config)
    compilation.static_forward_context = {}
    compilation.static_all_moe_layers = []
    plain.compilation_config = compilation
    return plain
