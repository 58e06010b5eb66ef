"""Checkpoints that are fetched or written, and models that cannot run."""

from __future__ import annotations

from rbln_backend.checkpoints.folders import (
    CATALOGUE,
    checkpoint_of,
    convert,
    fetch,
    is_on_hub,
    local_or_fetched,
    path_problem,
)
from rbln_backend.limits import MULTIMODAL
