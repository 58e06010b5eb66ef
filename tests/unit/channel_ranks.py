"""One of two ranks that talk to each other; run as a process by test_channel.

Arguments: its rank, a file where the ranks meet, the cache root of the kernels. Ends with 0 if all
holds that it checks.
"""

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, fx

from rbln_backend.collectives import (
    SEAT_BYTES,
    Group,
    groups,
    open_channel,
    register,
    union_of_ranks,
    use_channels,
    use_functional_ops,
    value_of_first_rank,
)
from rbln_backend.devices.emulated.kernel_set import load_kernels, native_library
from rbln_backend.errors import CompileError

RANKS = 2
# A value, odd numbers, and more than a seat holds at once.
COUNTS = (1, 7, 1000, SEAT_BYTES // 4 * 2 + 3)


def of_rank(rank: int, shape: list[int], dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(dtype)


def check_sums(channel: int) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for count in COUNTS:
            parts = [of_rank(rank, [count], dtype) for rank in range(RANKS)]
            expected = sum(part.float() for part in parts).to(dtype)
            own = parts[dist.get_rank()]
            assert torch.equal(torch.ops.rbln_channels.all_reduce(own, channel), expected)
            assert torch.equal(torch.ops.rbln_collectives.all_reduce(own, "tp"), expected)


def check_gathered(channel: int) -> None:
    for shape, dim in (([3, 5], -1), ([3, 5], 0), ([2, 3, 4], 1), ([2, SEAT_BYTES // 4 + 5], 1)):
        parts = [of_rank(rank, shape, torch.float32) for rank in range(RANKS)]
        expected, own = torch.cat(parts, dim), parts[dist.get_rank()]
        for op, group in ((torch.ops.rbln_channels, channel), (torch.ops.rbln_collectives, "tp")):
            assert torch.equal(op.all_gather(own, dim, RANKS, group), expected)


def check_counts(channel: int) -> None:
    """Check that the number of ranks in a stored graph must be that of the channel."""
    x = torch.ones(6, 2)
    for op in (torch.ops.rbln_channels.all_gather, torch.ops.rbln_channels.reduce_scatter):
        for ranks in (0, 1, 3):
            with pytest.raises(RuntimeError, match=f"of {ranks} ranks over a channel of {RANKS}"):
                op(x, 0, ranks, channel)


def graph_of_collectives() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x")
    ops = torch.ops.rbln_collectives
    total = graph.call_function(ops.all_reduce.default, (x, "tp"))
    wide = graph.call_function(ops.all_gather.default, (x, 0, RANKS, "tp"))
    part = graph.call_function(ops.reduce_scatter.default, (wide, 0, RANKS, "tp"))
    graph.output((total, wide, part))
    return graph


def check_graphs(group: Group, channel: int) -> None:
    x = of_rank(dist.get_rank(), [4, 6], torch.float32)
    expected = fx.GraphModule({}, graph_of_collectives())(x)
    through_memory, functional = graph_of_collectives(), graph_of_collectives()
    use_channels(through_memory, {"tp": channel})
    use_functional_ops(functional, {"tp": group})
    assert "rbln_channels" in str(through_memory)
    assert "rbln_collectives" not in str(functional)
    for graph in (through_memory, functional):
        for actual, wanted in zip(fx.GraphModule({}, graph)(x), expected, strict=True):
            assert torch.equal(actual, wanted)


def check_peers(group: Group) -> None:
    rank = dist.get_rank()
    names = union_of_ranks(group, lambda: {f"of-{rank}", "both"})
    assert names == {"of-0", "of-1", "both"}

    def fail_on_1() -> set[str]:
        if rank == 1:
            raise ValueError("no room")
        return set()

    with pytest.raises(*((ValueError,) if rank == 1 else (CompileError,)), match="no room"):
        union_of_ranks(group, fail_on_1)


def check_first_rank() -> None:
    group, rank = groups()["tp"], dist.get_rank()
    assert [value_of_first_rank(group, rank + own) for own in (0, 7, 200)] == [0, 7, 200]
    assert [value_of_first_rank(None, own) for own in (3, 0)] == [3, 0]


def check_death(channel: int) -> None:
    """Check that no rank waits for one that has ended. This ends rank 1."""
    if dist.get_rank() == 1:
        os._exit(0)
    with pytest.raises(RuntimeError, match="rank 1 of 2 has ended"):
        torch.ops.rbln_channels.all_reduce(torch.ones(3), channel)


def main(rank: int, meeting: str, cache_root: Path) -> None:
    load_kernels(cache_root, "native")
    dist.init_process_group("gloo", f"file://{meeting}", rank=rank, world_size=RANKS)
    world = dist.group.WORLD
    group = Group("tp", tuple(range(RANKS)), rank, world, world)
    register(group)
    library = native_library()
    assert library is not None
    channel = open_channel(group, library)
    assert channel is not None
    check_sums(channel)
    check_gathered(channel)
    check_counts(channel)
    check_graphs(group, channel)
    check_peers(group)
    check_first_rank()
    check_death(channel)
    # Its groups cannot be taken down: the other rank is gone.
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
