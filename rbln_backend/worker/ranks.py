"""What ranks exchange in a step: pipeline stages their tensors, data-parallel ranks its sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed.parallel_state import get_pp_group

from rbln_backend.collectives import Group
from rbln_backend.core import Phase, StepBatch, StepRound
from rbln_backend.reports.progress import RankPlace
from rbln_backend.settings import engine_settings
from rbln_backend.worker.draft_model import carried_states
from rbln_backend.worker.graph_functions import INTERMEDIATE, WHOLE, ModelPart
from rbln_backend.worker.inputs import StepInputs


class PipelineStage:
    """One of several stages. Tensors go through the group's gloo process group."""

    def __init__(self, part: ModelPart, group: Group) -> None:
        self.part = part
        self._group = group
        # Both sides take the tensors in the order of their names.
        self._received = sorted((*part.intermediates, *part.passed))
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def receive(self, inputs: StepInputs) -> None:
        """Wait for the previous stage's outputs of the same step. Called before a run.

        Raises ``RuntimeError`` when the previous rank has exited.
        """
        if self.part.is_first:
            return
        source = self._group.ranks[self._group.rank - 1]
        for name in self._received:
            dist.recv(inputs.tensors[INTERMEDIATE + name], src=source, group=self._group.host_group)

    def send(self, inputs: StepInputs, outputs: Sequence[Tensor]) -> None:
        """Send copies of the outputs, each [rows, H], to the next stage. Called after a run.

        ``inputs`` has what the stage only passes on. Raises ``RuntimeError`` when the next rank has
        exited.
        """
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


def stage_part(model: nn.Module, dtype: torch.dtype, whole: ModelPart = WHOLE) -> ModelPart:
    """Return this rank's part of the model; needs vLLM's process groups.

    ``dtype``: of hidden states. ``whole``: the part that a sole stage has; the last of several ends
    in ``argmax`` as it does.
    """
    group = get_pp_group()
    if group.world_size == 1:
        return whole
    names, states = tuple(_intermediates_like(model, dtype, 1).tensors), carried_states(model)
    is_first, is_last = bool(group.is_first_rank), bool(group.is_last_rank)
    return replace(
        whole,
        is_first=is_first,
        is_last=is_last,
        intermediates=() if is_first else (*names, *(states.received if is_last else ())),
        passed=() if is_last else states.received,
        sent=() if is_last else (*names, *states.computed),
        picks_tokens=whole.picks_tokens and is_last,
    )


def intermediate_buffers(model: nn.Module, dtype: torch.dtype, rows: int) -> dict[str, Tensor]:
    """Return buffers [rows, H] for the previous stage's outputs, by the name of the input."""
    outputs = _intermediates_like(model, dtype, rows)
    tensors: dict[str, Tensor] = dict(outputs.tensors)
    for name in carried_states(model).received:
        tensors[name] = torch.zeros_like(tensors["hidden_states"])
    return {INTERMEDIATE + name: tensor for name, tensor in tensors.items()}


def _intermediates_like(model: Any, dtype: torch.dtype, rows: int) -> Any:
    return model.make_empty_intermediate_tensors(rows, dtype, torch.device("cpu"))


# The rounds of a step, agreed between the data-parallel ranks of a mixture of experts.
#
# Their graphs share collectives, so all ranks run graphs of equal sizes: that of the largest
# prefill chunk of any rank, then that of the largest decode batch. A rank without requests of that
# phase runs the graph over padding.


# In the order in which ranks run them.
_PHASES = (Phase.PREFILL, Phase.POOLING, Phase.DECODE)


class DataRanks:
    """The ranks of several engines, all of which call ``rounds`` once per step."""

    def __init__(self, group: Group) -> None:
        self._group = group.host_group
        self._mine = torch.zeros(2, dtype=torch.int32)
        self._all = [torch.zeros(2, dtype=torch.int32) for _ in group.ranks]

    def rounds(self, batch: StepBatch | None) -> Sequence[StepRound]:
        """Return the rounds to run now; ``batch`` is None for a rank without requests.

        Raises ``RuntimeError`` when a rank has exited.
        """
        self._mine[0] = -1 if batch is None else _PHASES.index(batch.phase)
        self._mine[1] = 0 if batch is None else batch.size
        dist.all_gather(self._all, self._mine, group=self._group)
        return agreed([(number, size) for number, size in torch.stack(self._all).tolist()])


def agreed(sizes: Sequence[tuple[int, int]]) -> list[StepRound]:
    """Return the rounds for the ``(phase, size)`` of each rank.

    A phase is its index in the order of rounds, -1 for a rank without requests.
    """
    rounds = []
    for index, phase in enumerate(_PHASES):
        counts = tuple(size if of_rank == index else 0 for of_rank, size in sizes)
        if any(counts):
            rounds.append(StepRound(phase, max(counts), counts))
    return rounds


def rank_place(config: VllmConfig, rank: int, local_rank: int) -> RankPlace:
    parallel = config.parallel_config
    # Ray tells a rank which devices of its host the engine has, one for each of its ranks there.
    named = len(parallel.assigned_physical_gpu_ids or ())
    local = min(named or parallel.local_world_size, parallel.local_world_size)
    return RankPlace(
        engine=parallel.data_parallel_index,
        rank=rank,
        ranks=parallel.world_size,
        tensor_ranks=parallel.tensor_parallel_size,
        local_number=(parallel.data_parallel_rank_local or 0) * local + local_rank,
        local_ranks=local * engine_settings(config).local_engines,
    )
