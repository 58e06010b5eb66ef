"""One stage of a pipeline: what it gets from the stage before, and hands to the next.

Both sides know the shapes, those of the step's graph, so that nothing but the tensors travels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rbln_backend.parallel.collectives import Group, groups
from rbln_backend.vllm_compat.surface import get_pp_group
from rbln_backend.worker.graphs.functions import HANDED, WHOLE, ModelPart
from rbln_backend.worker.step.inputs import StepInputs


class Stage(Protocol):
    """Moves tensors between stages around the run of a graph."""

    part: ModelPart

    def receive(self, inputs: StepInputs) -> None:
        """Before a run: wait for what the stage before computed of the same step."""
        ...

    def hand_on(self, outputs: Sequence[Tensor]) -> None:
        """After a run: send the outputs, which the next run may overwrite."""
        ...


class SoleStage:
    """The whole model on one rank, or split across its layers alone."""

    part = WHOLE

    def receive(self, inputs: StepInputs) -> None:
        """Nothing comes before it."""

    def hand_on(self, outputs: Sequence[Tensor]) -> None:
        """Nothing comes after it."""


class PipelineStage:
    """A stage of several. Tensors go through the group's host side: gloo between any two hosts."""

    def __init__(self, part: ModelPart, group: Group) -> None:
        self.part = part
        self._group = group
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def receive(self, inputs: StepInputs) -> None:
        """Raises ``RuntimeError`` when the rank before is gone."""
        if self.part.is_first:
            return
        source = self._group.ranks[self._group.rank - 1]
        for name in self.part.received:
            dist.recv(inputs.tensors[name], src=source, group=self._group.host_group)

    def hand_on(self, outputs: Sequence[Tensor]) -> None:
        """Raises ``RuntimeError`` when the next rank is gone."""
        if self.part.is_last:
            return
        # The next stage has taken the tensors of the step before, or is about to: at most one step
        # is under way, so that a stage cannot run ahead of a slower one without end.
        for sent, _ in self._sent:
            sent.wait()
        target = self._group.ranks[self._group.rank + 1]
        self._sent = []
        for output in outputs:
            kept = output.contiguous().clone()
            work = dist.isend(kept, dst=target, group=self._group.host_group)
            assert work is not None
            self._sent.append((work, kept))


def make_stage(model: nn.Module, dtype: torch.dtype) -> Stage:
    """This rank's stage; vLLM's process groups exist. ``dtype`` is that of hidden states."""
    place = get_pp_group()
    if place.world_size == 1:
        return SoleStage()
    handed = tuple(_handed_like(model, dtype, 1))
    part = ModelPart(bool(place.is_first_rank), bool(place.is_last_rank), handed)
    return PipelineStage(part, groups()["pp"])


def handed_buffers(model: nn.Module, dtype: torch.dtype, rows: int) -> dict[str, Tensor]:
    """Buffers [rows, H] for what the stage before hands on, by the name of the graph's input."""
    return {HANDED + name: tensor for name, tensor in _handed_like(model, dtype, rows).items()}


def _handed_like(model: Any, dtype: torch.dtype, rows: int) -> Mapping[str, Tensor]:
    made = model.make_empty_intermediate_tensors(rows, dtype, torch.device("cpu"))
    tensors: Mapping[str, Tensor] = made.tensors
    return tensors
