"""The tokens of the largest logits, of steps in which every request takes those."""

from __future__ import annotations

from collections.abc import Callable

import torch

from rbln_backend.core import StepOutputs

TokenPicks = Callable[[StepOutputs, int], list[list[int]]]
"""Returns the token of each of the first n rows of a step, [n, 1], in the scheduler's order."""


def picked_by_graph(outputs: StepOutputs, count: int) -> list[list[int]]:
    """As ``TokenPicks``: the last output of the graph is the tokens, int32 [rows]."""
    picked: list[list[int]] = outputs[-1][:count, None].tolist()
    return picked


def kernel_picks() -> TokenPicks:
    """Return picks by the emulator's kernel; no row of the logits is copied.

    The operator is looked up once: torch would do so for every call.
    """
    greedy = torch.ops.rbln_emulator.greedy.default

    def pick(outputs: StepOutputs, count: int) -> list[list[int]]:
        picked: list[list[int]] = outputs.of_rows(0, count, greedy).tolist()
        return picked

    return pick
