"""Create the gate of one engine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from server import bounds
from server.host.job_pool import JobPool, process_starter
from server.settings import ServerSettings
from server.structured_outputs.constraint import SchemaLimits
from server.structured_outputs.gate import GrammarGate
from server.structured_outputs.grammars import SchemaRules
from server.structured_outputs.trial_process import serve_trials

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_WALL_PER_CPU = 10.0
"""Wall time of a trial, in multiples of its processor time."""


def make_gate(vllm_config: VllmConfig, settings: ServerSettings) -> GrammarGate:
    """Return the gate; its processes start with their first job."""
    cpu_s = settings.schema_compile_cpu_s
    rules = SchemaRules(
        compact=vllm_config.structured_outputs_config.disable_any_whitespace,
        closed=settings.undeclared_properties == "omit",
    )
    start = process_starter(
        settings.engine_start,
        serve_trials,
        "grammar-trials",
        vllm_config,
        cpu_s,
        rules,
    )
    pool = JobPool("grammar trials", start, settings.schema_workers, _WALL_PER_CPU * cpu_s)
    limits = SchemaLimits.of(settings)
    return GrammarGate(limits, pool, bounds.SCHEMA_CACHE_ENTRIES, cpu_s, rules=rules)
