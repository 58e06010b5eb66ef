"""A tensor of the first pipeline stage that the last one may need a copy of, such as a table."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from rbln_backend.parallel.collectives import groups


def lend(tensor: Tensor) -> None:
    """Send ``tensor`` [...] to the last stage if it needs it. Called in the first stage.

    Raises ``RuntimeError`` when the last rank has exited.
    """
    group, is_needed = groups()["pp"], torch.zeros(1, dtype=torch.uint8)
    last = group.ranks[-1]
    dist.recv(is_needed, src=last, group=group.host_group)
    if is_needed[0]:
        dist.send(tensor.contiguous(), dst=last, group=group.host_group)


def borrow(into: Tensor | None) -> None:
    """Fill ``into`` [...] from the first stage; None if it is not needed. Called in the last one.

    Raises ``RuntimeError`` when the first rank has exited.
    """
    group = groups()["pp"]
    first, is_needed = group.ranks[0], torch.tensor([into is not None], dtype=torch.uint8)
    dist.send(is_needed, dst=first, group=group.host_group)
    if into is not None:
        dist.recv(into, src=first, group=group.host_group)
