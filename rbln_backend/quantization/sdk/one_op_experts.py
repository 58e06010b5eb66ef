"""Quantised experts that one op of the SDK computes: no rank of an NPU computes them singly."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rbln_backend.graphs.operators import check_ops
from rbln_backend.moe.experts import ExpertAdapters
from rbln_backend.moe.paths import Choice
from rbln_backend.quantization.experts import RblnQuantizedMoEMethod


class OneOpExperts:
    """The parts of ``GluExperts`` that are not called where ``glu`` computes all of them."""

    adapters: ExpertAdapters | None = None
    form: str
    """Name of the format."""

    def chosen(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """As ``Experts``: x [T, H] to [T, H]; not called, an NPU computes them by ``glu``."""
        raise NotImplementedError(self._one_op)

    def weighted(self, x: Tensor, weights: Tensor, counts: Tensor) -> Tensor:
        """As ``Experts``: x [T, H] to [T, H]; not called, an NPU computes them by ``glu``."""
        raise NotImplementedError(self._one_op)

    def expert(self, x: Tensor, number: int) -> Tensor:
        """As ``Experts``: x [T, H] to [T, H]; not called, an NPU computes them by ``glu``."""
        raise NotImplementedError(self._one_op)

    @property
    def _one_op(self) -> str:
        return f"experts in {self.form} are computed by one op on an NPU"


class OneOpMoEMethod(RblnQuantizedMoEMethod):
    """A format whose experts an NPU computes by ``sdk_op``."""

    form: str
    """As ``OneOpExperts``."""

    def choose(self, layer: Any) -> None:
        """As ``RblnMoEMethod``; on an NPU the op of this format."""
        super().choose(layer)
        if not self.capabilities.packed_weights:
            check_ops(self.sdk_op)
            self.choice = Choice("glu", f"the SDK has an op for experts in {self.form}")
