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
    from rbln_backend.core import HeadCopy, WindowRestore, WindowStore


def _held_as(dtype: torch.dtype) -> torch.dtype:
    """Return uint8 for floats of 8 bits: the ops get their dtype as an argument."""
    return torch.uint8 if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else dtype


def _as_ops_take(shape: Sequence[int]) -> tuple[int, ...]:
    """Return [num_blocks, block_size, D] for a cache of latent attention, else ``shape``."""
    num_blocks, parts, *rest = shape
    return (num_blocks, *rest[-2:]) if parts == 1 else tuple(shape)


class _NpuKvMemory:
    """Copies that NPUs do not have: of the prefix log."""

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

    def read_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        """Not called: ``Capabilities.copies_caches`` is False, so page [...] has no reader."""
        raise NotImplementedError("a runtime of the SDK copies within the NPU only")

    def write_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        """Not called: ``Capabilities.copies_caches`` is False, so page [...] has no writer."""
        raise NotImplementedError("a runtime of the SDK copies within the NPU only")

    def shared_blocks(self, cache: Tensor) -> Tensor:
        """Not called: ``Capabilities.copies_caches`` is False; cache [num_blocks, ...]."""
        raise NotImplementedError("a runtime of the SDK copies within the NPU only")


class TensorKvMemory(_NpuKvMemory):
    """Tensors of torch's device ``rbln``, which torch-rbln brings."""

    def __init__(
        self,
        device: torch.device,
        on_out_of_memory: Callable[[Exception], Exception],
        aligned: Callable[[int], Tensor],
    ):
        """``aligned``: the SDK's ``aligned_tensor``, a number of float16 on whole host pages."""
        self._device = device
        self._failure = on_out_of_memory
        self._aligned = aligned

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

    def read_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        """As ``KvMemory``: cache and page [...], in contiguous pieces."""
        _copy_pieces(page, _tokens(cache, block, slot, page))

    def write_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        """As ``KvMemory``: cache and page [...], in contiguous pieces."""
        _copy_pieces(_tokens(cache, block, slot, page), page)

    def shared_blocks(self, cache: Tensor) -> Tensor:
        """Return host memory of the shape of ``cache`` [num_blocks, ...], as the vendor's NIXL."""
        return self._aligned(-(-cache.nbytes // 2)).view(cache.dtype).view(cache.shape)


def _tokens(cache: Tensor, block: int, slot: int, page: Tensor) -> Tensor:
    """Return as many tokens of a block as ``page`` [..., tokens, D] has, from ``slot``."""
    return cache[block][..., slot : slot + page.shape[-2], :]


def _copy_pieces(target: Tensor, source: Tensor) -> None:
    """Copy tokens [..., tokens, D] between the NPU and host memory.

    A whole block is one piece, as in the vendor's ``copy_host_device_kv_blocks``. The tokens of a
    part of a block lie together for each head only: the vendor copies them by head, because its
    runtime fails where neither side is contiguous (``spec_decode/dflash.py``).
    """
    if target.is_contiguous() and source.is_contiguous():
        torch._foreach_copy_([target], [source])
        return
    torch._foreach_copy_(_heads(target), _heads(source))


def _heads(tokens: Tensor) -> list[Tensor]:
    """Return the views [tokens, D] of ``tokens`` [..., tokens, D]."""
    return [tokens] if tokens.dim() == 2 else [v for t in tokens.unbind() for v in _heads(t)]
