"""What the engine and the server call on a worker to bring adapters in and out, by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rbln_backend.errors import AdapterError

if TYPE_CHECKING:
    from rbln_backend.lora.adapters import Adapters
    from rbln_backend.lora.target import Target
    from rbln_backend.vllm_compat.surface import VllmConfig


def register_adapted_layers(config: VllmConfig) -> None:
    """Let a model that is made from now on have the layers that adapters need."""
    if config.lora_config is not None:
        # vLLM's part of it takes a while to import.
        from rbln_backend.lora.lm_head import install_logits_processor

        install_logits_processor()


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

    def lora_targets(self) -> dict[str, Target]:
        """What an adapter may change, by the name of the module."""
        return self._loaded_adapters().targets()

    def pin_lora(self, lora_id: int) -> bool:
        """Let an adapter that a request brought along stay until it is removed."""
        return self._loaded_adapters().pin(lora_id)

    def _loaded_adapters(self) -> Adapters:
        if self._adapters is None:
            raise AdapterError("this engine takes no adapters; start it with --enable-lora")
        return self._adapters
