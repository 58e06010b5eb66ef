"""The adapter slots of a step's rows, written to the input of the step's graph."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from rbln_backend.core import StepBatch
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
    """A slot per request; none for requests without an adapter and for padding."""

    def __init__(self, adapters: Adapters, rows: RowOrder) -> None:
        """``rows``: the order of decode steps, which the step's rows are in already."""
        self._adapters, self._rows = adapters, rows

    def fill(self, inputs: StepInputs, batch: StepBatch) -> None:
        held = batch.input_batch
        # All prompts of a chunk have one adapter.
        count = 1 if batch.phase.takes_chunk else batch.num_reqs
        ids = held.request_lora_mapping[:count].tolist()
        slots = self._adapters.slots_of(ids, held.lora_id_to_lora_request)
        slots += [self._adapters.slot_of(request) for request in batch.decode_prefill]
        inputs.fill_adapters(slots if batch.phase.takes_chunk else self._rows.rearrange(slots))
