"""Transfers between pipeline stages.

Both sides know the shapes from the step's graph, so that only the tensors are sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rbln_backend.parallel.collectives import Group, groups
from rbln_backend.vllm_compat.surface import get_pp_group
from rbln_backend.worker.graphs.functions import INTERMEDIATE, WHOLE, ModelPart
from rbln_backend.worker.graphs.layer_states import carried_states
from rbln_backend.worker.step.inputs import StepInputs


class Stage(Protocol):
    """Moves tensors between stages around the run of a graph."""

    part: ModelPart

    def receive(self, inputs: StepInputs) -> None:
        """Wait for the previous stage's outputs of the same step. Called before a run."""
        ...

    def send(self, inputs: StepInputs, outputs: Sequence[Tensor]) -> None:
        """Send copies of the outputs, each [rows, H], to the next stage. Called after a run.

        ``inputs`` has what the stage only passes on.
        """
        ...


class SoleStage:
    """The only stage: the whole model, on one rank or split by tensor parallelism."""

    def __init__(self, part: ModelPart = WHOLE) -> None:
        self.part = part

    def receive(self, inputs: StepInputs) -> None:
        """Do nothing."""

    def send(self, inputs: StepInputs, outputs: Sequence[Tensor]) -> None:
        """Do nothing with ``outputs`` [...]."""


class PipelineStage:
    """One of several stages. Tensors go through the group's gloo process group."""

    def __init__(self, part: ModelPart, group: Group) -> None:
        self.part = part
        self._group = group
        # Both sides take the tensors in the order of their names.
        self._received = sorted((*part.intermediates, *part.passed))
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def receive(self, inputs: StepInputs) -> None:
        """As ``Stage``; raises ``RuntimeError`` when the previous rank has exited."""
        if self.part.is_first:
            return
        source = self._group.ranks[self._group.rank - 1]
        for name in self._received:
            dist.recv(inputs.tensors[INTERMEDIATE + name], src=source, group=self._group.host_group)

    def send(self, inputs: StepInputs, outputs: Sequence[Tensor]) -> None:
        """As ``Stage``, [rows, H] each; raises ``RuntimeError`` when the next rank has exited."""
        if self.part.is_last:
            return
        # At most one step is in flight, so that a stage cannot run ahead of a slower one.
        for sent, _ in self._sent:
            sent.wait()
        target = self._group.ranks[self._group.rank + 1]
        self._sent = []
        tensors = dict(zip(self.part.sent, outputs, strict=True))
        tensors |= {name: inputs.tensors[INTERMEDIATE + name] for name in self.part.passed}
        for name in sorted(tensors):
            copy = tensors[name].cpu().contiguous().clone()
            work = dist.isend(copy, dst=target, group=self._group.host_group)
            assert work is not None
            self._sent.append((work, copy))


def make_stage(model: nn.Module, dtype: torch.dtype, whole: ModelPart = WHOLE) -> Stage:
    """Return this rank's stage; needs vLLM's process groups. ``dtype``: of hidden states.

    ``whole``: the part that a sole stage has; the last of several ends in ``argmax`` as it does.
    """
    group = get_pp_group()
    if group.world_size == 1:
        return SoleStage(whole)
    names, states = tuple(_intermediates_like(model, dtype, 1).tensors), carried_states(model)
    is_first, is_last = bool(group.is_first_rank), bool(group.is_last_rank)
    part = replace(
        whole,
        is_first=is_first,
        is_last=is_last,
        intermediates=() if is_first else (*names, *(states.received if is_last else ())),
        passed=() if is_last else states.received,
        sent=() if is_last else (*names, *states.computed),
        picks_tokens=whole.picks_tokens and is_last,
    )
    return PipelineStage(part, groups()["pp"])


def intermediate_buffers(model: nn.Module, dtype: torch.dtype, rows: int) -> dict[str, Tensor]:
    """Return buffers [rows, H] for the previous stage's outputs, by the name of the input."""
    made = _intermediates_like(model, dtype, rows)
    tensors: dict[str, Tensor] = dict(made.tensors)
    for name in carried_states(model).received:
        tensors[name] = torch.zeros_like(tensors["hidden_states"])
    return {INTERMEDIATE + name: tensor for name, tensor in tensors.items()}


def _intermediates_like(model: Any, dtype: torch.dtype, rows: int) -> Any:
    return model.make_empty_intermediate_tensors(rows, dtype, torch.device("cpu"))
