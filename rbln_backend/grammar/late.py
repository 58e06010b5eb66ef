"""Masks of a step without those that are late."""

from __future__ import annotations

from dataclasses import dataclass, field

from rbln_backend.vllm_compat.surface import GrammarOutput


@dataclass
class MasksInTime(GrammarOutput):
    """Masks of a step; the requests of ``late`` have none yet and get no token in this step."""

    late: list[str] = field(default_factory=list)
