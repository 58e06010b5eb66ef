"""Search for the first layer whose hidden states depart from the reference's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from rbln_backend.parity.job import FloatArray, Layers

# A layer departs where its relative error is above what the dtype explains and this many times
# the error of the layer before it. Rounding grows by some tens of percent a layer.
JUMP = 4.0
# Relative error that rounding alone reaches after some layers, with room.
ROUNDING = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 5e-3}

Phase = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerDelta:
    """||state - reference|| / ||reference|| over the rows of a phase."""

    name: str
    prefill: float
    decode: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Departure:
    """Layer and phase at which the sides depart."""

    layer: str
    phase: Phase
    error: float
    error_before: float

    def __str__(self) -> str:
        return (
            f"{self.layer} departs in {self.phase}: relative error {self.error:.3g}, "
            f"{self.error_before:.3g} before it"
        )


def layer_deltas(reference: Layers, other: Layers, num_decoded: int) -> list[LayerDelta]:
    """Compare all layers; raises ``ValueError`` if the shapes of the sides differ."""
    if reference.states.shape != other.states.shape:
        raise ValueError(
            f"the sides' layers differ: {reference.states.shape} and {other.states.shape}"
        )
    split = reference.states.shape[1] - num_decoded
    return [
        LayerDelta(
            name=name,
            prefill=_relative(ref[:split], state[:split]),
            decode=_relative(ref[split:], state[split:]),
        )
        for name, ref, state in zip(other.names, reference.states, other.states, strict=True)
    ]


def first_departure(deltas: Sequence[LayerDelta], dtype: str) -> Departure | None:
    """Return the earliest layer that departs, in the phase with the larger error."""
    floor = ROUNDING.get(dtype, ROUNDING["bfloat16"])
    before = {"prefill": floor / JUMP, "decode": floor / JUMP}
    for delta in deltas:
        phase: Phase = "prefill" if delta.prefill >= delta.decode else "decode"
        error = getattr(delta, phase)
        if error > max(floor, JUMP * before[phase]):
            return Departure(layer=delta.name, phase=phase, error=error, error_before=before[phase])
        before = {"prefill": delta.prefill, "decode": delta.decode}
    return None


def _relative(reference: FloatArray, other: FloatArray) -> float:
    norm = float(np.linalg.norm(reference))
    error = float(np.linalg.norm(other - reference)) / norm if norm else 0.0
    # NaN counts as an infinite error.
    return error if np.isfinite(error) else float("inf")
