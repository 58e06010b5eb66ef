"""KV caches in an NPU's memory, in the two forms of the vendor's vllm-rbln 0.12.

No host tensor stands for a cache in either: what the host wrote would never reach the NPU. The
caches are not cleared, as the vendor's are not: a slot is written before a graph reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rbln_backend.kv_cache.transfers import HeadCopy, WindowRestore, WindowStore


def _held_as(dtype: torch.dtype) -> torch.dtype:
    """Return uint8 for floats of 8 bits: the ops get their dtype as an argument."""
    return torch.uint8 if dtype == torch.float8_e4m3fn else dtype


def _as_ops_take(shape: Sequence[int]) -> tuple[int, ...]:
    """Return [num_blocks, block_size, D] for a cache of latent attention, else ``shape``."""
    num_blocks, parts, *rest = shape
    return (num_blocks, *rest[-2:]) if parts == 1 else tuple(shape)


class _NpuKvMemory:
    """Copies that NPUs do not have: of the prefix log, and of pages of KV tiers."""

    def read_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        """Not called: tiers are refused, as no call of the SDK for page [...] is known."""
        raise NotImplementedError("KV tiers have no form on an NPU")

    def write_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        """Not called: tiers are refused, as no call of the SDK for page [...] is known."""
        raise NotImplementedError("KV tiers have no form on an NPU")

    def restore_window(self, cache: Tensor, log: Tensor, move: WindowRestore) -> None:
        """Not called: cache and log [...] exist on the emulated device only."""
        raise NotImplementedError("prefix reuse of sliding windows has no form on an NPU")

    def store_window(self, cache: Tensor, log: Tensor, move: WindowStore) -> None:
        """Not called: cache and log [...] exist on the emulated device only."""
        raise NotImplementedError("prefix reuse of sliding windows has no form on an NPU")


class StaticKvMemory(_NpuKvMemory):
    """Shapes that are named in a compile context; a runtime of it keeps the caches and copies."""

    def __init__(self, context: Any, runtimes: Sequence[Any]) -> None:
        """``runtimes``: those that were made in ``context``, filled while graphs are loaded."""
        self._context = context
        self._runtimes = runtimes

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """Return a meta tensor of ``shape`` [num_blocks, ...] at a fixed address of the NPU."""
        cache = torch.empty(_as_ops_take(shape), dtype=_held_as(dtype), device="meta")
        self._context.mark_static_address(cache, name)
        return cache

    def copy_heads(self, caches: Sequence[Tensor], copies: Sequence[HeadCopy]) -> None:  # noqa: ARG002
        """As ``KvMemory``, caches [num_blocks, ...]; the SDK copies in those of all groups.

        A block belongs to one group at a time, so the others' layers lose nothing.
        """
        for source, target, _, tokens in copies:
            self._runtimes[0]._copy_kv_cache(source, target, tokens)


class TensorKvMemory(_NpuKvMemory):
    """Tensors of torch's device ``rbln``, which torch-rbln brings."""

    def __init__(self, device: torch.device, on_out_of_memory: Callable[[Exception], Exception]):
        self._device = device
        self._failure = on_out_of_memory

    def allocate(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Return a cache of ``shape`` [num_blocks, ...]; raises ``DeviceMemoryError``."""
        try:
            return torch.empty(_as_ops_take(shape), dtype=_held_as(dtype), device=self._device)
        except RuntimeError as error:
            raise self._failure(error) from error

    def copy_heads(self, caches: Sequence[Tensor], copies: Sequence[HeadCopy]) -> None:
        """As ``KvMemory``: caches [num_blocks, 2, Hkv, 1, block_size, D]."""
        pairs = [(cache, copy) for cache in caches for copy in copies]
        sources = [cache[c.src_block_id][..., : c.num_tokens, :] for cache, c in pairs]
        targets = [cache[c.dst_block_id][..., : c.num_tokens, :] for cache, c in pairs]
        torch._foreach_copy_(targets, sources)
