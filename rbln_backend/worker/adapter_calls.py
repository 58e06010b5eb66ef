"""Worker methods that the engine and the server call by name to load and unload adapters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rbln_backend.errors import AdapterError

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters
    from rbln_backend.lora.target import Target


class AdapterCalls:
    """Adapter methods of a worker, available after ``load_model``.

    All raise ``AdapterError`` in an engine without ``--enable-lora``. ``request`` is vLLM's
    ``LoRARequest``, or the list of its fields if it came through ``collective_rpc``.
    """

    _adapters: Adapters | None = None

    def synchronize_device(self) -> None:
        """Wait for the step that the device runs; with asynchronous scheduling alone one may."""

    def stage_lora(self, request: object) -> None:
        """Start reading an adapter in the background; returns at once."""
        self._loaded_adapters().stage(request)

    def staged_lora(self, lora_int_id: int) -> tuple[str, str]:
        """Return "reading", "ready" or "failed", and the reason.

        Raises ``AdapterError`` for an adapter that was not staged.
        """
        return self._loaded_adapters().staged(lora_int_id)

    def add_lora(self, request: object) -> bool:
        """Load an adapter into a slot, from memory if staged; return False if it has a slot.

        Raises ``AdapterError`` for one that cannot be read or does not fit, and when ``max_loras``
        adapters are loaded.
        """
        self.synchronize_device()
        return self._loaded_adapters().add(request)

    def remove_lora(self, lora_id: int) -> bool:
        """Free the slot of an adapter that no running request uses; False for an unknown id."""
        self.synchronize_device()
        return self._loaded_adapters().remove(lora_id)

    def list_loras(self) -> set[int]:
        """Return the ids of all adapters that have a slot."""
        return set(self.lora_slots())

    def lora_slots(self) -> dict[int, int]:
        """Return the slot of each adapter by its id."""
        return self._loaded_adapters().slots()

    def lora_targets(self) -> dict[str, Target]:
        """Return the modules that an adapter can change, by name."""
        return self._loaded_adapters().targets()

    def pin_lora(self, lora_id: int) -> bool:
        """Keep an adapter that came with a request until ``remove_lora``."""
        return self._loaded_adapters().pin(lora_id)

    def _loaded_adapters(self) -> Adapters:
        if self._adapters is None:
            raise AdapterError("this engine takes no adapters; start it with --enable-lora")
        return self._adapters
