"""Grammar masks in the worker: applied to the logits on the host, and timed."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.vllm_compat.surface import (
    GrammarOutput,
    InputBatch,
    SchedulerOutput,
    apply_grammar_bitmask,
)


class GrammarMask:
    """Upstream's masking, with ``rbln_grammar_mask_seconds{part="apply"}`` on ``board``."""

    def __init__(self, board: MetricsBoard) -> None:
        self._seconds = board.histogram("rbln_grammar_mask_seconds", part="apply")

    def apply(
        self, scheduled: SchedulerOutput, grammar: GrammarOutput, batch: InputBatch, logits: Tensor
    ) -> Tensor:
        """Return ``logits`` ([num_reqs, V]) in float32, -inf where a grammar forbids the token."""
        started = time.perf_counter()
        logits = logits.to(torch.float32)
        apply_grammar_bitmask(scheduled, grammar, batch, logits)
        self._seconds.observe(time.perf_counter() - started)
        return logits
