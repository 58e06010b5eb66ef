"""What vLLM's layers call to talk to the other ranks: ops that a captured graph holds by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rbln_backend.parallel.collectives import Group, forget, register
from rbln_backend.vllm_compat.surface import DeviceCommunicatorBase


class RblnCommunicator(DeviceCommunicatorBase):
    """One group of ranks; made by vLLM, see ``Platform.get_device_communicator_cls``."""

    def __init__(
        self,
        cpu_group: torch.distributed.ProcessGroup,
        device: torch.device | None = None,
        device_group: torch.distributed.ProcessGroup | None = None,
        unique_name: str = "",
        **options: Any,
    ) -> None:
        super().__init__(cpu_group, device, device_group, unique_name, **options)
        # vLLM numbers groups of a kind within a process; other processes count differently.
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
        result: Tensor = torch.ops.rbln_collectives.all_reduce(input_, self.group_name)
        return result

    def all_gather(self, input_: Tensor, dim: int = -1) -> Tensor:
        result: Tensor = torch.ops.rbln_collectives.all_gather(
            input_, dim, self.world_size, self.group_name
        )
        return result

    def reduce_scatter(self, input_: Tensor, dim: int = -1) -> Tensor:
        result: Tensor = torch.ops.rbln_collectives.reduce_scatter(
            input_, dim, self.world_size, self.group_name
        )
        return result

    def destroy(self) -> None:
        forget(self._group)
