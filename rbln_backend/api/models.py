"""Checkpoints that are fetched or written, and models that cannot run."""

from __future__ import annotations

from rbln_backend.checkpoints.catalogue import CATALOGUE
from rbln_backend.checkpoints.folders import (
    checkpoint_of,
    convert,
    fetch,
    is_on_hub,
    local_or_fetched,
)
from rbln_backend.checkpoints.paths import path_problem
from rbln_backend.unsupported import MULTIMODAL
