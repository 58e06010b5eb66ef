"""The adapters' weights of one layer's experts, expert by expert and slot by slot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rbln_backend.lora.expert_layer import ExpertLayer, Matrices
from rbln_backend.lora.punica import RblnPunicaWrapper
from rbln_backend.lora.slot_stack import SlotStack
from rbln_backend.vllm_compat.lora import LoRAModel


class _Stacks(NamedTuple):
    """One projection: for each of E experts what ``SlotStack`` has, in tensors of [E, S, ...]."""

    a: Tensor
    b: tuple[Tensor, ...]
    like: SlotStack
    """The first expert's, as a view."""

    @classmethod
    def allocate(cls, experts: int, one: SlotStack) -> _Stacks:
        """Empty ones of the sizes of ``one``."""
        a = one.a.new_zeros(experts, *one.a.shape)
        b = tuple(stack.new_zeros(experts, *stack.shape) for stack in one.b)
        like = SlotStack(a[0], tuple(s[0] for s in b), one.rank, one.inputs, one.outputs)
        return cls(a, b, like)

    def image(self, experts: Sequence[Sequence[Matrices]]) -> list[Tensor]:
        """Per expert its slices, packed: [E, ...] for ``a`` and each of ``b``."""
        made = []
        for slices in experts:
            lower = [None if pair is None else pair[0] for pair in slices]
            upper = [None if pair is None else pair[1] for pair in slices]
            image = self.like.image(lower, upper)
            made.append((image.a, *image.b))
        return [torch.stack(parts) for parts in zip(*made, strict=True)]

    def write(self, slot: int, image: Sequence[Tensor] | None) -> None:
        """Put ``image``, or nothing, into ``slot`` of every expert."""
        stacks = (self.a, *self.b)
        for stack, part in zip(stacks, image or (None,) * len(stacks), strict=True):
            if part is None:
                stack[:, slot].zero_()
            else:
                stack[:, slot].copy_(part)

    def add(self, y: Tensor, x: Tensor, rows: Tensor, number: int) -> None:
        """Add one expert's adapters to y [T, outputs], of x [T, inputs]; see ``SlotStack.add``."""
        replace(self.like, a=self.a[number], b=tuple(s[number] for s in self.b)).add(y, x, rows)


class _Image(NamedTuple):
    """One adapter's tensors [E, ...] of both projections."""

    first: list[Tensor]
    second: list[Tensor]


class AdaptedExperts:
    """The experts of one layer, which compute with this; see ``Adapted`` and ``layers.experts``."""

    def __init__(
        self,
        layer: ExpertLayer,
        source: RblnPunicaWrapper,
        allocate: Callable[..., SlotStack],
    ) -> None:
        """``source`` and ``allocate`` are those of ``AdaptedLinear``."""
        self._layer, self._source = layer, source
        sizes = layer.sizes
        self._first, self._second = (
            _Stacks.allocate(
                sizes.count,
                allocate(inputs=inputs, outputs=outputs),
            )
            for inputs, outputs in ((sizes.hidden, sizes.first), (sizes.inner, (sizes.hidden,)))
        )

    def tensors(self) -> Mapping[str, Tensor]:
        """See ``Adapted``; shapes as in ``SlotStack``."""
        first = {f"b13.{index}": stack for index, stack in enumerate(self._first.b)}
        return {"a13": self._first.a, **first, "a2": self._second.a, "b2": self._second.b[0]}

    def image(self, adapter: LoRAModel) -> _Image | None:
        """As ``Adapted``."""
        experts = self._layer.matrices(adapter)
        if experts is None:
            return None
        first = self._first.image([each.first for each in experts])
        return _Image(first, self._second.image([[each.second] for each in experts]))

    def write(self, slot: int, image: _Image | None) -> None:
        """As ``Adapted``."""
        self._first.write(slot, None if image is None else image.first)
        self._second.write(slot, None if image is None else image.second)

    def arguments(self) -> tuple[Any, ...]:
        """Return the adapters' arguments of the ops for experts."""
        b1, b3 = (*self._first.b, None)[:2]
        parts = (self._first.a, b1, b3, self._second.a, self._second.b[0])
        return (self._source.rows, *parts, self._first.like.rank)

    def add_first(self, gate_up: Tensor, x: Tensor, number: int) -> None:
        """Add the adapters' part to the first projection of an expert; x is [rows, hidden]."""
        self._first.add(gate_up, x, self._source.rows, number)

    def add_second(self, out: Tensor, inner: Tensor, number: int) -> None:
        """Add the adapters' part to the second projection; ``inner`` is [rows, inner]."""
        self._second.add(out, inner, self._source.rows, number)
