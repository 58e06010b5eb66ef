"""Memory of large tensors: mapped on huge pages, kept between steps, torch's own on request."""

import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rbln_backend.config import RblnConfig
from rbln_backend.devices.emulated.memory import (
    HostKvMemory,
    choose_memory,
    keep_freed_memory,
    reserve_pages,
    zeros_on_demand,
)
from rbln_backend.errors import DeviceMemoryError
from rbln_backend.host.resources import core_budget
from rbln_backend.worker.worker import set_up_runtime

HUGE_PAGE = 2 << 20
# More than malloc ever keeps.
LARGE = 40 << 20


@pytest.fixture(autouse=True)
def restored(native_kernels: Path) -> Iterator[None]:
    # An engine of another test may have kept some.
    choose_memory(mapped=False, huge_pages=False)
    yield
    choose_memory(mapped=False, huge_pages=False)


def faults(num_bytes: int) -> int:
    """Page faults of making, filling and dropping a tensor."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.empty(num_bytes, dtype=torch.uint8).fill_(1)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def test_a_step_has_the_memory_of_the_one_before_once_it_is_kept() -> None:
    choose_memory(mapped=True, huge_pages=False)
    faults(LARGE)
    assert faults(LARGE) > 1000
    keep_freed_memory()
    faults(LARGE)
    assert faults(LARGE) < 100
    # A little less is served by the same mapping, much less by one of its own.
    assert faults(LARGE - LARGE // 8) < 100
    assert faults(LARGE // 2) > 1000


# As PyTorch's wheel for aarch64 does from 2.13 on. mimalloc keeps freed memory, as ours does, so
# that page faults do not tell the two apart.
_ALLOCATES_BY_MIMALLOC = b"mimalloc" in (Path(torch.__file__).parent / "lib/libc10.so").read_bytes()


@pytest.mark.skipif(_ALLOCATES_BY_MIMALLOC, reason="torch allocates by mimalloc: it keeps memory")
def test_the_system_allocator_faults_at_every_step() -> None:
    choose_memory(mapped=True, huge_pages=False)
    keep_freed_memory()
    faults(LARGE)
    assert choose_memory(mapped=False, huge_pages=False).allocator == "system"
    faults(LARGE)
    assert faults(LARGE) > 1000


def test_kept_memory_is_bounded() -> None:
    choose_memory(mapped=True, huge_pages=False)
    keep_freed_memory(2 * LARGE)
    before = resident_bytes()
    tensors = [torch.empty(LARGE, dtype=torch.uint8).fill_(i) for i in range(4)]
    assert resident_bytes() - before > 3.9 * LARGE
    tensors.clear()
    assert 1.9 * LARGE < resident_bytes() - before < 2.1 * LARGE
    # What is too large to be kept does not displace what is.
    faults(3 * LARGE)
    assert faults(LARGE) < 100


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_tensors_of_both_allocators_live_side_by_side() -> None:
    ours: list[torch.Tensor] = []
    for mapped in (False, True, False, True):
        choose_memory(mapped=mapped, huge_pages=True)
        ours += [torch.full((size,), len(ours)) for size in (8, 1 << 18, 1 << 19)]
        # resize_ hands memory from one allocator to the other.
        for tensor in ours:
            tensor.resize_(tensor.numel() * 2)
    assert [int(tensor[7]) for tensor in ours] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9]
    large = torch.empty(HUGE_PAGE + 1, dtype=torch.uint8)
    assert large.data_ptr() % HUGE_PAGE == 0


def test_zeros_are_lent_when_they_are_used() -> None:
    choose_memory(mapped=True, huge_pages=True)
    before = resident_bytes()
    zeros = zeros_on_demand((64, 3, 1 << 20), torch.bfloat16)
    assert (zeros.shape, zeros.dtype) == ((64, 3, 1 << 20), torch.bfloat16)
    assert resident_bytes() - before < zeros.nbytes // 8
    zeros[5] = 1
    assert float(zeros[4:7].sum()) == 3 << 20
    assert zeros_on_demand((0, 4), torch.float32).shape == (0, 4)


@pytest.mark.host_memory
def test_reserved_pages_are_mapped_at_once_and_keep_their_content() -> None:
    before = resident_bytes()
    cache = HostKvMemory(reserved=True).allocate("k", (64, 1 << 20), torch.bfloat16)
    assert resident_bytes() - before > 0.99 * cache.nbytes
    assert not cache.any()
    assert HostKvMemory(reserved=True).allocate("k", (0, 4), torch.bfloat16).shape == (0, 4)
    cache.fill_(1)
    reserve_pages(cache)
    assert bool((cache == 1).all())


@pytest.mark.host_memory
def test_memory_that_the_system_does_not_have_is_an_error(tmp_path: Path) -> None:
    # Pages behind the end of a file cannot be mapped, as those beyond a limit of memory.
    with (tmp_path / "cut").open("w+b") as file:
        file.truncate(4 * mmap.PAGESIZE)
        pages = torch.frombuffer(mmap.mmap(file.fileno(), 0), dtype=torch.uint8)
        file.truncate(0)
        with pytest.raises(DeviceMemoryError, match="cannot reserve 16384 bytes: Bad address"):
            reserve_pages(pages)
    with pytest.raises(
        DeviceMemoryError, match=r"reserved: KV cache of layer\.3: cannot map .* lower --kv-cache"
    ):
        HostKvMemory(reserved=True).allocate("layer.3", (1 << 47,), torch.uint8)


@pytest.mark.host_memory
def test_huge_pages_are_advised_where_the_system_has_them() -> None:
    system = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    allowed = system.exists() and "[never]" not in system.read_text()
    choice = choose_memory(mapped=True, huge_pages=True)
    assert choice.huge_pages == ("advised" if allowed else "off")
    assert is_advised(torch.empty(4 * HUGE_PAGE, dtype=torch.uint8)) == allowed
    assert is_advised(zeros_on_demand((8 * HUGE_PAGE,), torch.uint8)) == allowed
    assert choose_memory(mapped=True, huge_pages=False).huge_pages == "off"
    assert not is_advised(torch.empty(5 * HUGE_PAGE, dtype=torch.uint8))


def is_advised(tensor: torch.Tensor) -> bool:
    """Return True if the mapping in the middle of ``tensor`` has the kernel's huge-page flag."""
    address = tensor.data_ptr() + tensor.nbytes // 2
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first = line.split()[0]
        if "-" in first:
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= address < high
        elif inside and first == "VmFlags:":
            return "hg" in line.split()
    raise AssertionError(f"{address:x} is not mapped")


# ------------------------------------------------------------------------------------------ runtime
def test_by_default_the_rank_takes_its_cores_and_is_not_bound_to_them() -> None:
    mask = os.sched_getaffinity(0)
    info = set_up_runtime(RblnConfig(), 0, 1)
    budget = core_budget(mask)
    assert (info.threads, info.cores) == (budget.threads(0, 1), list(budget.cores))
    assert info.allocator == "mapped"
    assert os.sched_getaffinity(0) == mask
