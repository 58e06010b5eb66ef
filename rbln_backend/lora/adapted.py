"""Layers that adapters change, with the slots that hold their part of each adapter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from rbln_backend.lora.punica import RblnPunicaWrapper
from rbln_backend.lora.shares import Matrices, WholeLayer, share
from rbln_backend.lora.slot_stack import LayerImage, SlotStack
from rbln_backend.vllm_compat.lora import BaseLinearLayerWithLoRA, LoRAModel


class Adapted(Protocol):
    """One layer with the slots of all adapters."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Return the tensors that graphs read, by name in the layer; shapes as in ``SlotStack``."""
        ...

    def image(self, adapter: LoRAModel) -> Any:
        """Return this rank's part of an adapter for ``write``; None if it has none.

        Calls no kernel, so that another thread may do it while graphs run. Raises ``AdapterError``
        for a part that does not fit together.
        """
        ...

    def write(self, slot: int, image: Any) -> None:
        """Put an image, or nothing for None, into ``slot``."""
        ...


class OfOneStack:
    """A layer whose slots are one ``SlotStack``."""

    _stack: SlotStack

    def tensors(self) -> Mapping[str, Tensor]:
        """See ``Adapted``; shapes as in ``SlotStack``."""
        return self._stack.tensors()

    def write(self, slot: int, image: LayerImage | None) -> None:
        """As ``Adapted``."""
        self._stack.write(slot, image)


class AdaptedLinear(OfOneStack):
    """A linear layer that vLLM has wrapped, which reads its slots from here on."""

    def __init__(
        self,
        name: str,
        layer: BaseLinearLayerWithLoRA,
        source: RblnPunicaWrapper,
        allocate: Callable[..., SlotStack],
    ) -> None:
        """``source`` has the input of the graph that is being captured.

        ``allocate`` makes a stack of ``inputs`` and ``outputs``.
        """
        self._name, self._layer, self._source = name, layer, source
        outputs = tuple(stacked.shape[2] for stacked in layer.lora_b_stacked)
        self._stack = allocate(inputs=layer.lora_a_stacked[0].shape[3], outputs=outputs)
        layer.lora_a_stacked, layer.lora_b_stacked = (self._stack.a,), self._stack.b
        layer.output_slices = outputs
        # vLLM's makes rows of [B, L, H], whose axes an NPU wants.
        layer._apply_lora_to_output = self._add  # type: ignore[method-assign]

    def _add(self, x: Tensor, output: Tensor) -> Tensor:
        """Return ``output`` [..., outputs] of x [..., inputs] with what adapters make of x."""
        return self._stack.add(output, x, self._source.rows)

    @property
    def stack(self) -> SlotStack:
        """The layer's slots."""
        return self._stack

    @property
    def whole(self) -> WholeLayer:
        """The layer's sizes over all ranks."""
        return WholeLayer.of(self._layer)

    def image(self, adapter: LoRAModel) -> LayerImage | None:
        """As ``Adapted``."""
        weights = adapter.get_lora(self._name)
        if weights is None:
            return None
        slices = _slices(weights.lora_a, weights.lora_b, self.whole.outputs)
        return self._stack.image(*share(self._layer, *slices))


def _slices(a: Any, b: Any, outputs: tuple[int, ...]) -> tuple[Matrices, Matrices]:
    """The matrices per output slice, whether the adapter has one for each or one for all."""
    if isinstance(a, Tensor):
        return [a] * len(outputs), list(b.split(list(outputs)))
    return a, b
