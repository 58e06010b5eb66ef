"""Puts the gate together for one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server.host.job_pool import JobPool, process_starter
from server.settings import ServerSettings
from server.structured_outputs.constraint import SchemaLimits
from server.structured_outputs.gate import GrammarGate
from server.structured_outputs.trial_process import serve_trials

if TYPE_CHECKING:
    from vllm.config import VllmConfig


def make_gate(vllm_config: VllmConfig, settings: ServerSettings) -> GrammarGate:
    """Return the gate; its processes start with their first job."""
    start = process_starter(settings.engine_start, serve_trials, "grammar-trials", vllm_config)
    pool = JobPool(
        "grammar trials", start, settings.schema_workers, settings.schema_compile_timeout_s
    )
    return GrammarGate(SchemaLimits.of(settings), pool, settings.schema_cache_entries)
