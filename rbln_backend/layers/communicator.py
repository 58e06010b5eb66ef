"""The communicator of vLLM's layers, whose collectives are ops that a captured graph contains."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase

from rbln_backend.collectives import Group, register, unregister


class RblnCommunicator(DeviceCommunicatorBase):
    def __init__(
        self,
        cpu_group: torch.distributed.ProcessGroup,
        device: torch.device | None = None,
        device_group: torch.distributed.ProcessGroup | None = None,
        unique_name: str = "",
        **options: Any,
    ) -> None:
        super().__init__(cpu_group, device, device_group, unique_name, **options)
        # vLLM's number of a group differs between processes: keep the name before it.
        self.group_name = unique_name.partition(":")[0]
        self._group = Group(
            name=self.group_name,
            ranks=tuple(self.ranks),
            rank=self.rank_in_group,
            process_group=device_group or cpu_group,
            host_group=cpu_group,
        )
        register(self._group)

    def all_reduce(self, input_: Tensor) -> Tensor:
        """Return the sum over all ranks; shape [...] and dtype of ``input_``."""
        result: Tensor = torch.ops.rbln_collectives.all_reduce(input_, self.group_name)
        return result

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return the ranks' tensors of one shape and dtype, concatenated along ``dim``."""
        result: Tensor = torch.ops.rbln_collectives.all_gather(
            input_, dim, self.world_size, self.group_name
        )
        return result

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        """Return this rank's part of the sum: its shape is divided by the ranks along ``dim``."""
        result: Tensor = torch.ops.rbln_collectives.reduce_scatter(
            input_, dim, self.world_size, self.group_name
        )
        return result

    def destroy(self) -> None:
        unregister(self._group)
