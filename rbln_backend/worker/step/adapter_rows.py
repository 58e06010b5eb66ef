"""The adapter slots of a step's rows, written to the input of the step's graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rbln_backend.core import StepBatch
from rbln_backend.lora.slots import NO_ADAPTER
from rbln_backend.worker.step.inputs import RowOrder, StepInputs

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

    def __init__(self, adapters: Adapters, rows: RowOrder) -> None:
        """``rows``: the order of decode steps, which the step's rows are in already."""
        self._adapters, self._rows = adapters, rows

    def fill(self, inputs: StepInputs, batch: StepBatch) -> None:
        held, slots = batch.input_batch, inputs.adapter_slots
        # All prompts of a chunk have one adapter.
        count = min(batch.num_reqs, len(slots))
        ids = held.request_lora_mapping[:count].tolist()
        found = self._adapters.slots_of(ids, held.lora_id_to_lora_request)
        found += [self._adapters.slot_of(request) for request in batch.decode_prefill]
        slots[: len(found)] = found if batch.phase.takes_chunk else self._rows.rearrange(found)
        slots[len(found) :] = NO_ADAPTER
