"""Which adapter each row of a step uses, put where the step's graph reads it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rbln_backend.lora.slots import NO_ADAPTER
from rbln_backend.worker.step.batches import StepWork
from rbln_backend.worker.step.inputs import StepInputs

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters


class AdapterRows(Protocol):
    """Fills the part of a graph's inputs that tells of adapters."""

    def fill(self, inputs: StepInputs, work: StepWork) -> None:
        """Before every run; raises ``AdapterError`` for an adapter that cannot be had."""
        ...


class NoAdapterRows:
    """The engine knows no adapters."""

    def fill(self, inputs: StepInputs, work: StepWork) -> None:
        """Graphs have no such input."""


class SlotRows:
    """A slot per request; -1 for those without an adapter and for padding."""

    def __init__(self, adapters: Adapters) -> None:
        self._adapters = adapters

    def fill(self, inputs: StepInputs, work: StepWork) -> None:
        batch, slots = work.batch, inputs.adapter_slots
        # All prompts of a chunk have one adapter.
        count = min(work.num_reqs, len(slots))
        ids = batch.request_lora_mapping[:count].tolist()
        slots[:count] = self._adapters.slots_of(ids, batch.lora_id_to_lora_request)
        slots[count:] = NO_ADAPTER
        for row, reader in enumerate(work.readers, count):
            slots[row] = self._adapters.slot_of(reader)
