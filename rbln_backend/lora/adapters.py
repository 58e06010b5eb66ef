"""The adapters of one rank, for the worker's calls and for steps."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.utils.cache import LRUCache
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from rbln_backend.devices.port import Compiler
from rbln_backend.errors import AdapterError
from rbln_backend.lora.adapter_files import adapter_digests
from rbln_backend.lora.adapter_reader import AdapterReader, PackedAdapter, Staging, State
from rbln_backend.lora.layers import RblnPunicaWrapper
from rbln_backend.lora.model_manager import RblnLoraModelManager
from rbln_backend.lora.slots import INPUT_NAME, NO_ADAPTER, RowInput, SlotMask, SlotNumbers, Slots
from rbln_backend.settings import configured


class Adapters:
    """Wraps the model's layers once; afterwards an adapter comes and goes without a compile.

    Called from the engine's thread alone: between two steps, or by a step.
    """

    def __init__(
        self,
        model: nn.Module,
        vllm_config: VllmConfig,
        compiler: Compiler,
        *,
        on_change: Callable[[int], None] | None = None,
    ) -> None:
        """``on_change`` gets the number of used slots after each change.

        Raises ``UnsupportedModelError`` for a model without a layer to adapt.
        """
        self._reader = AdapterReader(vllm_config, compiler)
        self._reader.hashes_files = configured(vllm_config).has_kv_tiers
        self._reader.create_lora_manager(model, vllm_config)
        self.layers: RblnLoraModelManager = self._reader.layers
        """The layers with their slots."""
        self._staging = Staging(self._reader)
        lora = self._reader.lora_config
        self._slots = Slots(lora.max_loras)
        self.row_input: RowInput = SlotNumbers()
        """The form of the input of graphs that holds the slot of each row."""
        if not compiler.capabilities.runs_on_host:
            dtype: Any = lora.lora_dtype
            self.row_input = SlotMask(lora.max_loras, lora.max_lora_rank, dtype)
        most = lora.max_cpu_loras or lora.max_loras
        # Adapters as they lie in slots. Unless more are kept than there are slots, each is in one.
        self._kept: LRUCache[int, PackedAdapter] = LRUCache(most)
        self._keeps_more = most > lora.max_loras
        self._digests = adapter_digests(vllm_config.instance_id)
        self._in_use: Callable[[], Collection[int]] = tuple
        self._on_change = on_change

    def read_by(self, inputs: Mapping[str, Tensor]) -> None:
        """Make the next captured graph read its slots from its ``inputs``; see ``RowInput``."""
        for wrapper in self.layers.punica_wrapper_mapping.values():
            assert isinstance(wrapper, RblnPunicaWrapper)
            if INPUT_NAME in inputs:
                wrapper.rows = inputs[INPUT_NAME]

    def serve(self, in_use: Callable[[], Collection[int]]) -> None:
        """Start: ``in_use`` gives the adapters of the requests that are in a batch."""
        self._in_use = in_use

    def stage(self, request: object) -> None:
        """Start reading an adapter in the background; see ``add``."""
        self._staging.begin(_as_request(request))

    def staged(self, lora_int_id: int) -> tuple[State, str]:
        """Return the state and the reason of a failure; ``AdapterError`` for an unknown id."""
        return self._staging.state(lora_int_id)

    def add(self, request: object) -> bool:
        """Put an adapter into a slot, by a copy if it was staged; False if it is in one.

        Raises ``AdapterError`` for one that cannot be read, and when all slots are taken.
        """
        wanted = _as_request(request)
        if wanted.lora_int_id in self._slots and not wanted.load_inplace:
            self._slots.keep(wanted.lora_int_id)
            return False
        self._put(wanted, passing=False)
        return True

    def remove(self, lora_int_id: int) -> bool:
        """Free an adapter's slot or its staged copy; return whether it was known.

        The caller makes sure that no request uses it.
        """
        was_staged = self._staging.drop(lora_int_id)
        was_there = lora_int_id in self._slots
        if was_there:
            # An NPU multiplies by every slot, in use or not.
            self.layers.write(self._slots[lora_int_id], {})
            self._slots.release(lora_int_id)
        self._kept.pop(lora_int_id, None)
        self._digests.pop(lora_int_id, None)
        self._report_change()
        return was_there or was_staged

    def pin(self, lora_int_id: int) -> bool:
        """Keep an adapter until it is removed; raises ``AdapterError`` if it is in no slot."""
        if lora_int_id not in self._slots:
            raise AdapterError(f"adapter {lora_int_id} is not loaded")
        self._slots.keep(lora_int_id)
        return True

    def slots(self) -> dict[int, int]:
        return self._slots.as_dict()

    def get_slots(self, ids: Sequence[int], requests: Mapping[int, LoRARequest]) -> list[int]:
        """The slots of the rows of a step, whose adapters are ``ids``, 0 for none.

        An adapter that a request brought along is read now. Raises ``AdapterError``.
        """
        found = []
        for lora_int_id in ids:
            if not lora_int_id:
                found.append(NO_ADAPTER)
                continue
            if lora_int_id not in self._slots:
                self._put(requests[lora_int_id], passing=True)
            self._slots.touch(lora_int_id)
            self._kept.touch(lora_int_id)
            found.append(self._slots[lora_int_id])
        return found

    def get_slot(self, request: CachedRequestState) -> int:
        """The slot of one request's adapter, as ``get_slots``."""
        adapter = request.lora_request
        if adapter is None:
            return NO_ADAPTER
        return self.get_slots([adapter.lora_int_id], {adapter.lora_int_id: adapter})[0]

    def close(self) -> None:
        self._staging.close()

    def _put(self, request: LoRARequest, *, passing: bool) -> None:
        number = request.lora_int_id
        is_new = number not in self._slots
        if is_new:
            # First, so that a staged adapter stays staged if no slot is free.
            self._slots.reserve(number, self._in_use(), passing=passing)
        if not passing:
            # Its files are read anew, also those of an id that was in use.
            self._kept.pop(number, None)
        try:
            adapter = self._kept.get(number) or self._staging.take(request)
        except AdapterError:
            if is_new:
                self._slots.release(number)
            raise
        finally:
            self._report_change()
        self._digests.pop(number, None)
        self.layers.write(self._slots[number], adapter.images)
        if self._keeps_more:
            self._kept[number] = adapter
        if adapter.digest is not None:
            self._digests[number] = adapter.digest

    def _report_change(self) -> None:
        if self._on_change is not None:
            self._on_change(len(self._slots))


def _as_request(request: Any) -> LoRARequest:
    """``request``, which comes over the engine's socket as the list of its fields."""
    if isinstance(request, LoRARequest):
        return request
    return msgspec.convert(request, LoRARequest)
