"""The tokens of the largest logits, of steps in which every request takes those."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rbln_backend.core import StepOutputs
from rbln_backend.emulator.kernel_set import native_library, start_recording
from rbln_backend.emulator.replay import Recording

TokenPicks = Callable[[StepOutputs, int], list[list[int]]]
"""Returns the token of each of the first n rows of a step, [n, 1], in the scheduler's order."""

IntArray = npt.NDArray[np.int32]
_MOST_CALLS = 128


def picked_by_graph(outputs: StepOutputs, count: int) -> list[list[int]]:
    """As ``TokenPicks``: the last output of the graph is the tokens, int32 [rows]."""
    picked: list[list[int]] = outputs[-1][:count, None].tolist()
    return picked


class _Call(NamedTuple):
    """A recorded call of the kernel over ``logits`` [rows, V], which writes ``tokens`` [rows, 1].

    It holds the tensors: no other one gets their memory.
    """

    recording: Recording
    logits: Tensor
    tokens: IntArray


class KernelPicks:
    """Picks by the emulator's kernel; no row of the logits is copied.

    A graph has the same logits in each run, so that the kernel's call can be recorded and made
    again without torch's dispatcher, which costs a step several times what the kernel does.
    """

    def __init__(self) -> None:
        # By the identity of the logits.
        self._calls: dict[int, _Call] = {}
        # Only calls of native kernels can be recorded.
        self._records = native_library() is not None

    def __call__(self, outputs: StepOutputs, count: int) -> list[list[int]]:
        picked: list[list[int]] = outputs.of_rows(0, count, self._pick).tolist()
        return picked

    def _pick(self, logits: Tensor) -> IntArray:
        call = self._calls.get(id(logits))
        if call is not None:
            call.recording.replay(0, 1)
            return call.tokens
        if not self._records:
            tokens: IntArray = torch.ops.rbln_emulator.greedy(logits).numpy()
            return tokens
        if len(self._calls) >= _MOST_CALLS:
            # More than an engine has graphs: theirs are not recorded, and the logits new each time.
            self._records = False
            self._calls.clear()
        return self._recorded(logits).tokens

    def _recorded(self, logits: Tensor) -> _Call:
        recording = start_recording()
        try:
            tokens = torch.ops.rbln_emulator.greedy(logits).numpy()
        finally:
            recording.end()
        call = _Call(recording, logits, tokens)
        if self._records:
            self._calls[id(logits)] = call
        return call
