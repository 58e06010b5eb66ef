"""The device's own collectives: gloo computes them, and the log says which groups are theirs."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from rebel import log


def _make(options: Any, _: object) -> Any:
    from torch_rbln._internal.rdma_env import _apply_control_plane_ips

    _apply_control_plane_ips()
    log.write(
        "ccl",
        ranks=list(options.global_ranks_in_group),
        size=options.group_size,
        finds_ports=os.environ.get("RCCL_PORT_GEN"),
        rank=os.environ.get("LOCAL_RANK"),
    )
    return dist.ProcessGroupGloo(
        options.store, options.group_rank, options.group_size, timeout=options.timeout
    )


def replace() -> None:
    """Make the groups of torch-rbln's ``rbln-ccl``, whether it is loaded before us or after."""
    register = dist.Backend.register_backend

    def register_ours(name: str, func: Any, *args: Any, **options: Any) -> None:
        register(name, _make if name == "rbln-ccl" else func, *args, **options)

    setattr(dist.Backend, "register_backend", register_ours)  # noqa: B010
