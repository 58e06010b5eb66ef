"""Weights on small pages first: which tensors, and that huge pages keep addresses and content."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from rbln_backend.emulator.kernel_set import native_library
from rbln_backend.emulator.memory import choose_memory, move_to_huge_pages
from rbln_backend.emulator.packing import pack, pack_consuming, pack_reference
from rbln_backend.host import weight_pages
from rbln_backend.host.weight_pages import HUGE_PAGE, WEIGHT_PAGES, lends_slowly

Pack = Callable[[Tensor], Tensor]
SYSTEM = Path("/sys/kernel/mm/transparent_hugepage/enabled")
LINUX = tuple(int(number) for number in os.uname().release.split(".")[:2])
pytestmark = [
    pytest.mark.host_memory,
    pytest.mark.skipif(
        not SYSTEM.exists() or "[madvise]" not in SYSTEM.read_text(),
        reason="needs advised huge pages",
    ),
    pytest.mark.skipif(LINUX < (6, 1), reason="needs MADV_COLLAPSE"),
]


@pytest.fixture(autouse=True)
def restored(native_kernels: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(weight_pages, "_DELAY_S", 0.0)
    choose_memory(mapped=True, huge_pages=True)
    yield
    choose_memory(mapped=False, huge_pages=False)


def start_deferring() -> None:
    library = native_library()
    assert library is not None
    WEIGHT_PAGES.defer(library.rbln_emulator_use_huge_pages)


def huge_bytes(tensor: Tensor) -> int:
    """Return the bytes on huge pages of the mapping that ``tensor`` begins."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0]:
            low, high = (int(part, 16) for part in words[0].split("-"))
            inside = low <= tensor.data_ptr() < high
        elif inside and words[0] == "AnonHugePages:":
            return 1024 * int(words[1])
    return 0


def replaced(*weights: Tensor) -> None:
    thread = move_to_huge_pages(weights)
    assert thread is not None
    thread.join(60.0)
    assert not thread.is_alive()


def test_weights_move_to_huge_pages_in_the_background() -> None:
    start_deferring()
    with WEIGHT_PAGES.small():
        weight = torch.randint(0, 256, (6 * HUGE_PAGE,), dtype=torch.uint8)
    expected, address = weight.clone(), weight.data_ptr()
    assert huge_bytes(weight) == 0
    replaced(weight)
    assert huge_bytes(weight) >= weight.nbytes
    assert weight.data_ptr() == address
    assert torch.equal(weight, expected)


@pytest.mark.parametrize("pack_one", [pack, pack_consuming])
def test_packed_weights_move_as_well(pack_one: Pack) -> None:
    start_deferring()
    with WEIGHT_PAGES.small():
        weight = torch.randn(2048, 2048).bfloat16()
    expected = pack_reference(weight)
    packed = pack_one(weight)
    assert huge_bytes(packed) == 0
    replaced()
    assert huge_bytes(packed) >= packed.nbytes
    assert torch.equal(packed, expected)


def test_other_tensors_have_huge_pages_at_once() -> None:
    start_deferring()
    with WEIGHT_PAGES.small():
        pass
    assert huge_bytes(torch.ones(4 * HUGE_PAGE, dtype=torch.uint8)) > 0


def test_freed_weights_are_no_error() -> None:
    start_deferring()
    with WEIGHT_PAGES.small():
        weight = torch.ones(4 * HUGE_PAGE, dtype=torch.uint8)
    WEIGHT_PAGES.add((weight.data_ptr(), weight.nbytes))
    del weight
    replaced()


def test_nothing_is_deferred_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rbln_backend.emulator.memory.lends_slowly", lambda _bytes: False)
    choose_memory(mapped=True, huge_pages=True)
    with WEIGHT_PAGES.small():
        weight = torch.ones(4 * HUGE_PAGE, dtype=torch.uint8)
    assert huge_bytes(weight) > 0
    assert move_to_huge_pages([weight]) is None


def test_slow_systems_are_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_pages, "_SLOW_S", 10.0)
    assert not lends_slowly()
    monkeypatch.setattr(weight_pages, "_SLOW_S", 0.0)
    assert lends_slowly()


def test_as_many_pages_are_probed_as_the_weights_need(monkeypatch: pytest.MonkeyPatch) -> None:
    # The clock is read twice for each page; pages behind the 60th take a second.
    ticks = (1.0 * max(0, reading - 120) for reading in itertools.count())
    monkeypatch.setattr(weight_pages.time, "thread_time", lambda: next(ticks))
    assert not lends_slowly()
    ticks = (1.0 * max(0, reading - 120) for reading in itertools.count())
    assert lends_slowly(100 * HUGE_PAGE)
