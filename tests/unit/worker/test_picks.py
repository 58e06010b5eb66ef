"""Tokens of greedy steps: the first of the largest logits, in the scheduler's order."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from rbln_backend.core import StepOutputs
from rbln_backend.devices.emulated.kernel_set import load_kernels
from rbln_backend.worker.inputs import DecodeRows, LongestFirst
from rbln_backend.worker.sampling import KernelPicks, make_picks
from tests.kernel_cache import share_kernels

ROWS, VOCABULARY = 4, 300


@pytest.fixture(autouse=True)
def native(tmp_path: Path) -> None:
    load_kernels(share_kernels(tmp_path), "native")


def largest(logits: torch.Tensor) -> list[list[int]]:
    return logits.float().argmax(-1, keepdim=True).tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_logits_of_a_graph_change_from_run_to_run(dtype: torch.dtype) -> None:
    pick = make_picks(by_graph=False, runs_on_host=True)
    assert pick is not None
    logits = torch.zeros(ROWS, VOCABULARY, dtype=dtype)
    for _ in range(3):
        # All different, so that each row has one largest value.
        for row in logits:
            row.copy_(torch.randperm(VOCABULARY))
        assert pick(StepOutputs([logits]), ROWS) == largest(logits)
        assert pick(StepOutputs([logits]), 3) == largest(logits)[:3]


def test_tokens_come_back_in_the_schedulers_order() -> None:
    pick, order = KernelPicks(), LongestFirst()
    blocks = [np.zeros((3, 1), dtype=np.int32)]
    order.arrange(DecodeRows(np.arange(3), np.array([5, 20, 7]), blocks), ROWS)
    logits = torch.zeros(ROWS, VOCABULARY)
    # Rows of the graph: requests 1, 2 and 0, and padding.
    logits[[0, 1, 2], [11, 12, 10]] = 1.0
    for _ in range(2):
        assert pick(StepOutputs([logits], order.restore), 3) == [[10], [11], [12]]


def test_logits_that_are_new_in_each_run_are_not_kept() -> None:
    pick = KernelPicks()
    for _ in range(5):
        logits = torch.randn(ROWS, VOCABULARY)
        assert pick(StepOutputs([logits]), ROWS) == largest(logits)
    seen = ref(logits)
    del logits
    assert seen() is None


def test_every_graph_is_recorded_and_a_released_one_is_forgotten() -> None:
    """More graphs than any earlier limit; each replays after all of them have run."""
    pick, graphs = KernelPicks(), [torch.randn(ROWS, VOCABULARY) for _ in range(200)]
    for _ in range(2):
        assert all(pick(StepOutputs([g]), ROWS) == largest(g) for g in graphs)
    ran: list[str] = []

    class Dispatched(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            ran.append(str(func))
            return func(*args, **(kwargs or {}))

    with Dispatched():
        for graph in graphs:
            pick(StepOutputs([graph]), ROWS)
    assert not [name for name in ran if "greedy" in name]
    released = ref(graph)
    del graph, graphs
    assert released() is None
