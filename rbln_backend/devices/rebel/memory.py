"""Memory of an NPU: KV caches, in the two forms of the vendor's vllm-rbln 0.12, and other tensors.

No host tensor stands for a cache in either form: what the host wrote would never reach the NPU. The
caches are not cleared, as the vendor's are not: a slot is written before a graph reads it. The
other tensors lie in host memory, or all of them on the NPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from rbln_backend.core import HeadCopy
from rbln_backend.graphs.tensors import INPUT


def _held_as(dtype: torch.dtype) -> torch.dtype:
    """Return uint8 for floats of 8 bits: the ops get their dtype as an argument."""
    return torch.uint8 if dtype in (torch.float8_e4m3fn, torch.float8_e5m2) else dtype


def _as_ops_take(shape: Sequence[int]) -> tuple[int, ...]:
    """Return [num_blocks, block_size, D] for a cache of latent attention, else ``shape``."""
    num_blocks, parts, *rest = shape
    return (num_blocks, *rest[-2:]) if parts == 1 else tuple(shape)


class _NpuKvMemory:
    """What NPUs do not have: a prefix log and, without torch-rbln, copies to host memory."""

    def restore_window(self, *_: object, **__: object) -> NoReturn:
        """Not called: there are prefix logs on the emulated device only."""
        raise NotImplementedError("prefix reuse of sliding windows has no form on an NPU")

    store_window = restore_window

    def _copy_to_host(self, *_: object, **__: object) -> NoReturn:
        """Not called: ``Capabilities.copies_caches`` is False."""
        raise NotImplementedError("a runtime of the SDK copies within the NPU only")


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

    read_tokens = write_tokens = shared_blocks = _NpuKvMemory._copy_to_host


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
        pairs = [(cache, copy) for cache in caches for copy in copies]
        sources = [cache[c.src_block_id][..., : c.num_tokens, :] for cache, c in pairs]
        targets = [cache[c.dst_block_id][..., : c.num_tokens, :] for cache, c in pairs]
        torch._foreach_copy_(targets, sources)

    def read_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
        _copy_pieces(page, _tokens(cache, block, slot, page))

    def write_tokens(self, cache: Tensor, block: int, slot: int, page: Tensor) -> None:
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


class Moved:
    """Weights that have moved to the NPU, each once for all graphs."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._copies: dict[int, tuple[Tensor, Tensor]] = {}

    def on_npu(self, tensor: Tensor) -> Tensor:
        """Return the NPU copy of ``tensor`` [...]; for a weight the host keeps its shape alone."""
        if id(tensor) not in self._copies:
            copy = tensor.detach().to(self.device)
            if isinstance(tensor, nn.Parameter):
                # The SDK tells weights by it. Buffers stay: vLLM shares rotary tables with the
                # next model of this process.
                copy = nn.Parameter(copy, requires_grad=False)
                _keep_shape(tensor)
            self._copies[id(tensor)] = (tensor, copy)
        return self._copies[id(tensor)][1]

    def resident(self, tensor: Tensor) -> Tensor:
        """Return the NPU copy of ``tensor`` [...], no weight, of which the host keeps its shape."""
        copy = self.on_npu(tensor)
        _keep_shape(tensor)
        return copy


def _keep_shape(tensor: Tensor) -> None:
    tensor.data = tensor.data.new_empty(()).expand(tensor.shape)


class BoundTensors:
    """The arguments of one runtime.

    In host memory it copies what it needs; caches are known to it by their names. On the NPU
    weights move for good, when the first graph reads them, and a step's buffers have copies there.
    """

    def __init__(
        self, bindings: Sequence[str], tensors: Sequence[Tensor], moved: Moved | None
    ) -> None:
        """``moved``: weights on the NPU; None if tensors [...] stay in host memory."""
        self._filled: list[tuple[Tensor, Tensor]] = []
        self._bindings = list(bindings)
        self.arguments = list(tensors)
        if moved is None:
            return
        for number, (binding, tensor) in enumerate(zip(bindings, tensors, strict=True)):
            if tensor.device.type == moved.device.type:
                continue
            if binding.startswith(INPUT):
                self.arguments[number] = tensor.to(moved.device)
                self._filled.append((self.arguments[number], tensor))
            else:
                self.arguments[number] = moved.on_npu(tensor)

    def put(self, name: str, tensor: Tensor) -> None:
        """Read ``tensor`` [...] of the NPU's memory as the input ``name``; it is not copied."""
        number = self._bindings.index(INPUT + name)
        copy, self.arguments[number] = self.arguments[number], tensor
        self._filled = [pair for pair in self._filled if pair[0] is not copy]

    def fill(self) -> None:
        """Copy a step's buffers to the NPU; without torch-rbln the runtime reads them itself."""
        for copy, tensor in self._filled:
            copy.copy_(tensor)
