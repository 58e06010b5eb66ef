"""The test of adapter slots at a start on an NPU: graphs must compute what lies in a slot now.

A compiler that takes slots for weights may keep a private copy of them. Every adapter would then
have the answers of an empty slot, and no error would tell.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rbln_backend.compiler.port import CompiledGraph
from rbln_backend.core import GraphSpec
from rbln_backend.lora.slot_stack import LayerImage
from rbln_backend.lora.slots import INPUT_NAME, NO_ADAPTER
from rbln_backend.unsupported import LORA_UNPROVEN
from rbln_backend.worker.graphs.functions import INTERMEDIATE
from rbln_backend.worker.graphs.warmup_plan import ADAPTER_PRODUCT
from rbln_backend.worker.step.inputs import StepInputs

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters

Outputs = Sequence[Tensor]
Images = dict[str, LayerImage]
"""By layer."""

# Any tokens but 0, whose embedding may be zero; each is tried.
_TOKENS = (1, 7)
# Of the size of outputs: rounding differs from run to run by less, known values by more.
_DIFFERENCE = 0.02


class SlotProof:
    """Writes zeros, known values and zeros again into slots, and runs every graph over each.

    One small graph is the product of the first layer's slots alone, which the host computes, too.
    """

    def __init__(self, adapters: Adapters) -> None:
        self._row_input, self._layers = adapters.row_input, adapters.layers
        stack = next(iter(self._layers.stacks.values()))
        self.inputs = {
            "hidden": torch.zeros(ADAPTER_PRODUCT.bucket, 1, stack.inputs, dtype=stack.a.dtype),
            INPUT_NAME: self._row_input.allocate(ADAPTER_PRODUCT.bucket),
        }
        """Of the small graph."""

    @torch.inference_mode()
    def run(
        self, graphs: Mapping[GraphSpec, CompiledGraph], inputs: Mapping[GraphSpec, StepInputs]
    ) -> None:
        """Raise ``UnsupportedModelError`` with the reason if LoRA cannot be served.

        ``inputs``: of the graphs of steps. The slots are empty before and after.
        """
        last = self._layers.lora_slots - 1
        slots = sorted({0, last})
        known = {slot: self._known_images(slot) for slot in slots}
        expected = self._fill_product(known)
        empty, filled, again = (
            self._outputs(graphs, inputs, last, {slot: images.get(slot, {}) for slot in slots})
            for images in ({}, known, {})
        )
        for spec in empty:
            if not _differ(filled[spec], empty[spec]):
                raise LORA_UNPROVEN.refusal(
                    f"graph {spec}: known values in a slot did not change its answer, because the "
                    "SDK took a private copy of the slots"
                )
            if _differ(again[spec], empty[spec]):
                raise LORA_UNPROVEN.refusal(f"graph {spec}: a slot that was emptied still answers")
        if _differ(filled[ADAPTER_PRODUCT], [expected]):
            raise LORA_UNPROVEN.refusal(
                f"graph {ADAPTER_PRODUCT}: its product with known values is not the host's"
            )

    def _known_images(self, seed: int) -> Images:
        """Return random values of the full rank for every layer."""
        generator = torch.Generator().manual_seed(seed)
        return {name: x.known_image(generator) for name, x in self._layers.stacks.items()}

    def _fill_product(self, known: Mapping[int, Images]) -> Tensor:
        """Fill the inputs of the small graph; return what it must give, [rows, 1, outputs]."""
        hidden, mask = self.inputs["hidden"], self.inputs[INPUT_NAME]
        hidden.copy_(torch.randn(hidden.shape, generator=torch.Generator().manual_seed(0)))
        slots = [NO_ADAPTER, *known]
        self._row_input.fill(mask, [slots[n % len(slots)] for n in range(len(hidden))])
        name, stack = next(iter(self._layers.stacks.items()))
        own = {slot: images[name] for slot, images in known.items()}
        return stack.on_host(self._layers.lora_slots, own).product(hidden, mask)

    def _outputs(
        self,
        graphs: Mapping[GraphSpec, CompiledGraph],
        inputs: Mapping[GraphSpec, StepInputs],
        slot: int,
        images: Mapping[int, Images],
    ) -> dict[GraphSpec, Outputs]:
        """Write ``images`` by slot; return the outputs of each graph, with ``slot`` in all rows."""
        for number, image in images.items():
            self._layers.write(number, image)
        found: dict[GraphSpec, Outputs] = {ADAPTER_PRODUCT: _copied(graphs[ADAPTER_PRODUCT].run())}
        for spec, own in inputs.items():
            outputs = []
            for token in _TOKENS:
                _fill(own, token, slot)
                outputs += _copied(graphs[spec].run())
            found[spec] = outputs
            own.fill_idle()
        return found


def _fill(inputs: StepInputs, token: int, slot: int) -> None:
    """Fill rows of padding that are computed like others."""
    inputs.fill_idle()
    inputs.token_ids[...] = token
    inputs.fill_mask([inputs.spec.bucket] * len(inputs.tokens_mask))
    inputs.fill_adapters([slot] * inputs.spec.batch_size)
    for name, tensor in inputs.tensors.items():
        if name.startswith(INTERMEDIATE):
            tensor.copy_(torch.linspace(-1, 1, tensor.shape[-1]).expand(tensor.shape))


def _copied(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [output.cpu().float() for output in outputs if output.is_floating_point()]


def _differ(some: Outputs, others: Outputs) -> bool:
    return any(
        bool((one - other).abs().mean() > _DIFFERENCE * other.abs().mean())
        for one, other in zip(some, others, strict=True)
    )
