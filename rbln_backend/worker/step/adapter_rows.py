"""The adapter slots of a step's rows, written to the input of the step's graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rbln_backend.core import StepBatch
from rbln_backend.lora.slots import NO_ADAPTER
from rbln_backend.worker.step.inputs import StepInputs

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters


class AdapterRows(Protocol):
    """Fills the adapter slots of a graph's inputs."""

    def fill(self, inputs: StepInputs, batch: StepBatch) -> None:
        """Called before every run; raises ``AdapterError`` for an adapter without a slot."""
        ...


class NoAdapterRows:
    """An engine without adapters."""

    def fill(self, inputs: StepInputs, batch: StepBatch) -> None:
        """Do nothing: graphs have no such input."""


class SlotRows:
    """A slot per request; -1 for requests without an adapter and for padding."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    def fill(self, inputs: StepInputs, batch: StepBatch) -> None:
        held, slots = batch.input_batch, inputs.adapter_slots
        # All prompts of a chunk have one adapter.
        count = min(batch.num_reqs, len(slots))
        ids = held.request_lora_mapping[:count].tolist()
        slots[:count] = self._adapters.slots_of(ids, held.lora_id_to_lora_request)
        slots[count:] = NO_ADAPTER
        for row, request in enumerate(batch.decode_prefill, count):
            slots[row] = self._adapters.slot_of(request)
