"""The adapters' weights of one linear layer, slot by slot, and a graph's product with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rbln_backend.devices.emulated.packing import pack_reference, packed_shape
from rbln_backend.errors import AdapterError


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
            *(flat_y, flat_x, rows, self.a, list(self.b), self.rank, list(self.outputs))
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
        """Return such slots in host memory, filled with ``images``."""
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
