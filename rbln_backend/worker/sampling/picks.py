"""The tokens of the largest logits, of steps in which every request takes those."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from weakref import ReferenceType, ref

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


def picked_by_graph(outputs: StepOutputs, count: int) -> list[list[int]]:
    """As ``TokenPicks``: the last output of the graph is the tokens, int32 [rows]."""
    picked: list[list[int]] = outputs[-1][:count, None].tolist()
    return picked


class _Call(NamedTuple):
    """A recorded call of the kernel over logits [rows, V], which writes ``tokens`` [rows, 1]."""

    recording: Recording
    tokens: IntArray


class KernelPicks:
    """Picks by the emulator's kernel; no row of the logits is copied.

    A graph has the same logits in each run, so that the kernel's call can be recorded and made
    again without torch's dispatcher, which costs a step several times what the kernel does.
    """

    def __init__(self) -> None:
        # By the identity of logits. References that end with the logits keep no released graph's
        # memory; logits are recorded when they come a second time, since some are new in each run.
        self._known: dict[int, ReferenceType[Tensor]] = {}
        self._calls: dict[int, _Call] = {}
        # Only calls of native kernels can be recorded.
        self._records = native_library() is not None

    def __call__(self, outputs: StepOutputs, count: int) -> list[list[int]]:
        picked: list[list[int]] = outputs.of_rows(0, count, self._pick).tolist()
        return picked

    def _pick(self, logits: Tensor) -> IntArray:
        key = id(logits)
        call = self._calls.get(key)
        if call is not None:
            call.recording.replay(0, 1)
            return call.tokens
        if key in self._known:
            self._calls[key] = call = _recorded(logits)
            return call.tokens
        if self._records:
            self._known[key] = ref(logits, lambda _: self._forget(key))
        tokens: IntArray = torch.ops.rbln_emulator.greedy(logits).numpy()
        return tokens

    def _forget(self, key: int) -> None:
        del self._known[key]
        self._calls.pop(key, None)


def _recorded(logits: Tensor) -> _Call:
    recording = start_recording()
    try:
        tokens = torch.ops.rbln_emulator.greedy(logits).numpy()
    finally:
        recording.end()
    return _Call(recording, tokens)
