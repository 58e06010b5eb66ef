"""The LM head alone, over a few rows at a time (prompt logprobs)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rbln_backend.core import GraphSpec, Phase
from rbln_backend.lora.slots import INPUT_NAME
from rbln_backend.vllm_compat.surface import CachedRequestState
from rbln_backend.worker.graphs.dispatch import GraphDispatch
from rbln_backend.worker.graphs.warmup_plan import LOGITS_ROWS

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters

SPEC = GraphSpec.of(Phase.LOGITS, LOGITS_ROWS)


class LmHead:
    """The graph of the LM head as a function: hidden [n, H] of a request to logits [n, V]."""

    def __init__(
        self,
        hidden_size: int,
        dtype: torch.dtype,
        dispatch: GraphDispatch,
        adapters: Adapters | None = None,
    ) -> None:
        """``adapters`` is None in an engine without adapters."""
        self.inputs = {"hidden": torch.zeros(LOGITS_ROWS, hidden_size, dtype=dtype)}
        if adapters is not None:
            self.inputs[INPUT_NAME] = adapters.row_input.allocate(1)
        self._dispatch, self._adapters = dispatch, adapters

    def __call__(self, hidden: Tensor, request: CachedRequestState) -> Tensor:
        buffer, pieces = self.inputs["hidden"], []
        if self._adapters is not None:
            slot = self._adapters.slot_of(request)
            self._adapters.row_input.fill(self.inputs[INPUT_NAME], [slot])
        for piece in hidden.split(LOGITS_ROWS):
            rows = len(piece)
            buffer[:rows] = piece
            buffer[rows:] = 0
            logits = self._dispatch.get(SPEC).run()[0].cpu()
            # The next run may overwrite the output.
            pieces.append(logits[:rows].clone())
        return torch.cat(pieces)
