"""Slots of adapters: who has which, their weights in a layer, and the slot of each row."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rbln_backend.devices.emulated.packing import pack_reference, packed_shape
from rbln_backend.errors import AdapterError

INPUT_NAME = "lora_slots"
"""The graph input that holds the slot of each request; see ``RowInput``."""
NO_ADAPTER = -1
"""The slot of rows without an adapter, and of padding."""


class Slots:
    """``max_loras`` slots.

    An adapter that was added stays until it is removed. One that came with a request, as in offline
    engines, is evicted once no request in a batch uses it, the least recently used first.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._count = count
        self._slot_of: dict[int, int] = {}
        # Adapters that came with requests; the least recently used first.
        self._passing: dict[int, None] = {}

    def __contains__(self, lora_int_id: int) -> bool:
        return lora_int_id in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def __getitem__(self, lora_int_id: int) -> int:
        """The slot; raises ``KeyError`` for an adapter that is in none."""
        return self._slot_of[lora_int_id]

    def as_dict(self) -> dict[int, int]:
        return dict(self._slot_of)

    def reserve(self, lora_int_id: int, in_use: Collection[int], *, passing: bool) -> int:
        """A slot for an adapter that has none; raises ``AdapterError`` when all are taken.

        ``in_use`` are the adapters of requests in a batch.
        """
        slot = self._free.pop() if self._free else self._evict(in_use)
        self._slot_of[lora_int_id] = slot
        if passing:
            self._passing[lora_int_id] = None
        return slot

    def keep(self, lora_int_id: int) -> None:
        self._passing.pop(lora_int_id, None)

    def touch(self, lora_int_id: int) -> None:
        if lora_int_id in self._passing:
            del self._passing[lora_int_id]
            self._passing[lora_int_id] = None

    def release(self, lora_int_id: int) -> bool:
        """Free an adapter's slot; whether it had one."""
        slot = self._slot_of.pop(lora_int_id, None)
        if slot is None:
            return False
        self._passing.pop(lora_int_id, None)
        self._free.append(slot)
        return True

    def _evict(self, in_use: Collection[int]) -> int:
        for candidate in self._passing:
            if candidate not in in_use:
                self.release(candidate)
                return self._free.pop()
        raise AdapterError(
            f"all {self._count} adapter slots are taken (--max-loras {self._count}); "
            "remove an adapter first"
        )


class RowInput(Protocol):
    """Makes and fills the input of a graph."""

    def allocate(self, rows: int) -> Tensor:
        """Return the input of ``rows`` rows without adapters."""

    def fill(self, tensor: Tensor, slots: Sequence[int]) -> None:
        """Fill an input with the slots of its first rows; the others have none."""


class SlotNumbers:
    """int32 [B]: the slot of each row, for a kernel that skips rows without one."""

    def allocate(self, rows: int) -> Tensor:
        """As ``RowInput``, [rows]."""
        return torch.full((rows,), NO_ADAPTER, dtype=torch.int32)

    def fill(self, tensor: Tensor, slots: Sequence[int]) -> None:
        """As ``RowInput``, tensor [B]."""
        numbers = tensor.numpy()
        numbers[: len(slots)] = slots
        numbers[len(slots) :] = NO_ADAPTER


class SlotMask:
    """[B, 1, S * rank]: ones at the columns of a row's slot, for products with all slots."""

    def __init__(self, slots: int, rank: int, dtype: torch.dtype) -> None:
        own = torch.eye(slots, dtype=dtype).repeat_interleave(rank, dim=1)
        self._masks = torch.cat((torch.zeros(1, slots * rank, dtype=dtype), own))
        """Of no adapter first, then of each slot."""

    def allocate(self, rows: int) -> Tensor:
        """As ``RowInput``, [rows, 1, S * rank]."""
        return self._masks.new_zeros(rows, 1, self._masks.shape[1])

    def fill(self, tensor: Tensor, slots: Sequence[int]) -> None:
        """As ``RowInput``, tensor [B, 1, S * rank]."""
        rows = [*slots, *(NO_ADAPTER,) * (len(tensor) - len(slots))]
        numbers = torch.tensor(rows) - NO_ADAPTER
        torch.index_select(self._masks, 0, numbers, out=tensor.view(len(tensor), -1))


@dataclass(frozen=True, slots=True)
class LayerImage:
    """One adapter's weights of one layer as they lie in a slot."""

    a: Tensor
    b: tuple[Tensor, ...]


@dataclass(frozen=True)
class SlotStack:
    """S slots for a layer of one or several output slices (q, k and v of qkv).

    ``a`` stacks S packed matrices of [slices * rank, inputs]; ``b`` has one stack per slice, of
    packed [outputs, rank]. An adapter of a lower rank leaves the rest zero.
    """

    a: Tensor
    b: tuple[Tensor, ...]
    rank: int
    inputs: int
    outputs: tuple[int, ...]

    @classmethod
    def allocate(
        cls, *, slots: int, rank: int, inputs: int, outputs: Sequence[int], dtype: torch.dtype
    ) -> SlotStack:
        """Empty slots for adapters of up to ``rank``."""
        a = torch.zeros(slots, *packed_shape(dtype, len(outputs) * rank, inputs), dtype=dtype)
        b = [torch.zeros(slots, *packed_shape(dtype, size, rank), dtype=dtype) for size in outputs]
        return cls(a, tuple(b), rank, inputs, tuple(outputs))

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors that graphs read, by name; shapes as in the class."""
        return {"a": self.a} | {f"b{index}": stack for index, stack in enumerate(self.b)}

    def image(self, a: Sequence[Tensor | None], b: Sequence[Tensor | None]) -> LayerImage:
        """Lay out an adapter: per slice [r, inputs] and [outputs, r], or None where it has none.

        Calls no kernel, so that another thread may do it while graphs run. Raises ``AdapterError``
        for values beyond the dtype: where a graph multiplies by all slots, they would reach the
        rows of other adapters.
        """
        down = self.a.new_zeros(len(self.outputs) * self.rank, self.inputs)
        up = [self.a.new_zeros(size, self.rank) for size in self.outputs]
        for index, (lower, upper) in enumerate(zip(a, b, strict=True)):
            if lower is None or upper is None:
                continue
            first = index * self.rank
            down[first : first + lower.shape[0]] = lower
            up[index][:, : upper.shape[1]] = upper
        if not all(torch.isfinite(matrix).all() for matrix in (down, *up)):
            raise AdapterError(
                "lora_B times lora_alpha / r has values beyond "
                f"{str(down.dtype).removeprefix('torch.')}"
            )
        return self._laid_out(down, up)

    def _laid_out(self, down: Tensor, up: Sequence[Tensor]) -> LayerImage:
        return LayerImage(pack_reference(down), tuple(pack_reference(matrix) for matrix in up))

    def write(self, slot: int, image: LayerImage | None) -> None:
        """Put an adapter into ``slot``; None: it does not touch this layer."""
        if image is None:
            self.a[slot].zero_()
            return
        self.a[slot].copy_(image.a)
        for stack, matrix in zip(self.b, image.b, strict=True):
            stack[slot].copy_(matrix)

    def add(self, y: Tensor, x: Tensor, rows: Tensor) -> Tensor:
        """Return y [..., outputs] with what the adapters of ``rows`` make of x [..., inputs].

        ``rows``: the input of the graph as ``row_input`` has it. The scale is in the weights.
        """
        flat_y, flat_x = (t.flatten(0, 1) if t.dim() == 3 else t for t in (y, x))
        torch.ops.rbln_emulator.add_lora_.default(
            flat_y, flat_x, rows, self.a, list(self.b), self.rank, list(self.outputs)
        )
        return flat_y if flat_y is y else flat_y.view(y.shape)


@dataclass(frozen=True)
class MatrixStack(SlotStack):
    """S slots side by side in plain matrices, which graphs of an NPU multiply by as a whole.

    ``a`` is [slices * S * rank, inputs], ``b`` per slice [S * rank, outputs]. They are inputs of
    every graph, as KV caches are, and no weights: a compiler may keep a copy of a weight.
    """

    homes: tuple[Tensor, ...]
    """What graphs read and ``write`` fills, of the shapes of ``a`` and ``b``."""

    @classmethod
    def on_device(
        cls,
        *,
        slots: int,
        rank: int,
        inputs: int,
        outputs: Sequence[int],
        dtype: torch.dtype,
        resident: Callable[[Tensor], Tensor],
    ) -> MatrixStack:
        """Empty slots where ``resident`` puts them; see ``Compiler.resident``."""
        a = torch.zeros(len(outputs) * slots * rank, inputs, dtype=dtype)
        b = tuple(torch.zeros(slots * rank, size, dtype=dtype) for size in outputs)
        return cls(a, b, rank, inputs, tuple(outputs), tuple(resident(x) for x in (a, *b)))

    def _laid_out(self, down: Tensor, up: Sequence[Tensor]) -> LayerImage:
        return LayerImage(down, tuple(matrix.t().contiguous() for matrix in up))

    def write(self, slot: int, image: LayerImage | None) -> None:
        """As ``SlotStack``, by copies from whole to whole host matrices."""
        lower, *upper = self.homes
        first = slot * self.rank
        by_slice = lower.view(len(self.outputs), -1, self.inputs).unbind()
        targets = [home[first : first + self.rank] for home in (*by_slice, *upper)]
        if image is None:
            sources = [torch.zeros(target.shape, dtype=target.dtype) for target in targets]
        else:
            sources = [*image.a.split(self.rank), *image.b]
        torch._foreach_copy_(targets, sources)

    def add(self, y: Tensor, x: Tensor, rows: Tensor) -> Tensor:
        """As ``SlotStack``; x [B, L, inputs], or rows [B * L, inputs] of experts."""
        delta = self.product(x if x.dim() == 3 else x.view(len(rows), -1, self.inputs), rows)
        return y + (delta if delta.shape == y.shape else delta.view(y.shape))

    def on_host(self, slots: int, images: Mapping[int, LayerImage]) -> MatrixStack:
        made = self.on_device(
            slots=slots,
            rank=self.rank,
            inputs=self.inputs,
            outputs=self.outputs,
            dtype=self.a.dtype,
            resident=lambda tensor: tensor,
        )
        for slot, image in images.items():
            made.write(slot, image)
        return made

    def known_image(self, generator: torch.Generator) -> LayerImage:
        """Return random values of about the size that a layer's outputs have."""
        shapes = ((self.rank, self.inputs), *((size, self.rank) for size in self.outputs))
        lower, *upper = (torch.randn(s, generator=generator) * s[1] ** -0.5 for s in shapes)
        return self.image([lower] * len(upper), upper)

    def product(self, x: Tensor, rows: Tensor) -> Tensor:
        """Return what adapters make of x [B, L, inputs]: [B, L, outputs].

        ``rows`` [B, 1, S * rank] has ones at the columns of a row's slot, so that the products of
        the other slots are multiplied by zero.
        """
        lower = torch.nn.functional.linear(x, self.a)
        parts = lower.chunk(len(self.outputs), dim=-1) if len(self.outputs) > 1 else [lower]
        added = [torch.matmul(part * rows, b) for part, b in zip(parts, self.b, strict=True)]
        return torch.cat(added, dim=-1) if len(added) > 1 else added[0]
