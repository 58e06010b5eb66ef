"""The LM head alone, over a few rows at a time (prompt logprobs)."""

from __future__ import annotations

import torch
from torch import Tensor

from rbln_backend.compiler.port import GraphSpec, Phase
from rbln_backend.worker.graphs.dispatch import GraphDispatch
from rbln_backend.worker.graphs.warmup_plan import LOGITS_ROWS

SPEC = GraphSpec.of(Phase.LOGITS, LOGITS_ROWS)


class LmHead:
    """Callable: hidden [n, H] -> logits [n, V], in runs of ``LOGITS_ROWS`` padded rows."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, dispatch: GraphDispatch) -> None:
        self.inputs = {"hidden": torch.zeros(LOGITS_ROWS, hidden_size, dtype=dtype)}
        self._dispatch = dispatch

    def __call__(self, hidden: Tensor) -> Tensor:
        buffer, pieces = self.inputs["hidden"], []
        for piece in hidden.split(LOGITS_ROWS):
            rows = len(piece)
            buffer[:rows] = piece
            buffer[rows:] = 0
            logits = self._dispatch.get(SPEC).run()[0]
            # The next run may overwrite the output.
            pieces.append(logits[:rows].clone())
        return torch.cat(pieces)
