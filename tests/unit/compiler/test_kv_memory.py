"""Copies between an NPU's caches and host memory, over torch's CPU in place of ``rbln``."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from rbln_backend.devices.rebel.memory import TensorKvMemory

Pairs = list[tuple[Tensor, Tensor]]


@pytest.fixture
def memory() -> TensorKvMemory:
    def aligned(count: int) -> Tensor:
        return torch.empty(count, dtype=torch.float16)

    return TensorKvMemory(torch.device("cpu"), lambda error: error, aligned)


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Pairs:
    """Copies that torch made."""
    made: Pairs = []
    copy = torch._foreach_copy_

    def note(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        made.extend(zip(targets, sources, strict=True))
        copy(list(targets), list(sources))

    monkeypatch.setattr(torch, "_foreach_copy_", note)
    return made


@pytest.mark.parametrize("shape", [(4, 2, 3, 1, 16, 8), (4, 16, 8)])
@pytest.mark.parametrize(("slot", "tokens"), [(0, 16), (4, 8)])
def test_tokens_go_out_and_come_back_in_contiguous_pieces(
    memory: TensorKvMemory, pairs: Pairs, shape: tuple[int, ...], slot: int, tokens: int
) -> None:
    """The vendor's runtime fails where neither side of a copy is contiguous."""
    cache = memory.allocate("layer", shape, torch.float32).normal_()
    page = torch.empty(*shape[1:-2], tokens, shape[-1])
    memory.read_tokens(cache, 2, slot, page)
    assert torch.equal(page, cache[2][..., slot : slot + tokens, :])
    before = cache.clone()
    memory.write_tokens(cache, 1, slot, page)
    before[1][..., slot : slot + tokens, :] = page
    assert torch.equal(cache, before)
    assert all(one.is_contiguous() for pair in pairs for one in pair)
    heads = 1 if tokens == shape[-2] else page[..., 0, 0].numel()
    assert len(pairs) == 2 * heads


def test_shared_blocks_have_the_shape_of_the_cache(memory: TensorKvMemory) -> None:
    cache = memory.allocate("layer", (3, 2, 1, 1, 5, 3), torch.uint8)
    shared = memory.shared_blocks(cache)
    assert (shared.shape, shared.dtype, shared.is_contiguous()) == (cache.shape, torch.uint8, True)
