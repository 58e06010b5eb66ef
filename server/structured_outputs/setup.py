"""Puts the gate together for one engine."""

from __future__ import annotations

from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import TYPE_CHECKING

from server.settings import ServerSettings
from server.structured_outputs.constraint import SchemaLimits
from server.structured_outputs.gate import GrammarGate
from server.structured_outputs.trial_pool import TrialPool
from server.structured_outputs.trial_process import serve_trials

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_PROCESSES: dict[str, type[BaseProcess]] = {
    "forkserver": ForkServerProcess,
    "spawn": SpawnProcess,
}


def make_gate(vllm_config: VllmConfig, settings: ServerSettings) -> GrammarGate:
    """Return the gate; its processes start with their first job, the way the engine's did."""

    def start(pipe: Connection) -> BaseProcess:
        process = _PROCESSES[settings.engine_start](
            target=serve_trials, args=(pipe, vllm_config), name="grammar-trials", daemon=True
        )
        process.start()
        return process

    pool = TrialPool(start, settings.schema_workers, settings.schema_compile_timeout_s)
    return GrammarGate(SchemaLimits.of(settings), pool, settings.schema_cache_entries)
