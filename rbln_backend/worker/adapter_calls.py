"""What the engine and the server call on a worker to bring adapters in and out, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rbln_backend.errors import AdapterError

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters


class AdapterCalls:
    """The part of a worker that knows adapters; they come after ``load_model``.

    All raise ``AdapterError`` in an engine without ``--enable-lora``. ``request`` is vLLM's
    ``LoRARequest``, or the list of its fields where it came through ``collective_rpc``.
    """

    _adapters: Adapters | None = None

    def stage_lora(self, request: object) -> None:
        """Start reading an adapter in the background; returns at once."""
        self._loaded_adapters().stage(request)

    def staged_lora(self, lora_int_id: int) -> tuple[str, str]:
        """ "reading", "ready" or "failed", and why; ``AdapterError`` if it was not staged."""
        return self._loaded_adapters().staged(lora_int_id)

    def add_lora(self, request: object) -> bool:
        """Put an adapter into a slot, by a copy if it was staged; False if it is in one already.

        Raises ``AdapterError`` for one that cannot be read or does not fit, and when ``max_loras``
        adapters are there.
        """
        return self._loaded_adapters().add(request)

    def remove_lora(self, lora_id: int) -> bool:
        """Free an adapter's slot, which no running request needs any more; False for a stranger."""
        return self._loaded_adapters().remove(lora_id)

    def list_loras(self) -> set[int]:
        """The ids of all adapters that are in a slot."""
        return set(self.lora_slots())

    def lora_slots(self) -> dict[int, int]:
        """The slot of each adapter by its id."""
        return self._loaded_adapters().slots()

    def lora_targets(self) -> dict[str, tuple[int, int]]:
        """The modules that an adapter may change: (inputs, outputs) by name."""
        return self._loaded_adapters().targets()

    def pin_lora(self, lora_id: int) -> bool:
        """Let an adapter that a request brought along stay until it is removed."""
        return self._loaded_adapters().pin(lora_id)

    def _loaded_adapters(self) -> Adapters:
        if self._adapters is None:
            raise AdapterError("this engine takes no adapters; start it with --enable-lora")
        return self._adapters
