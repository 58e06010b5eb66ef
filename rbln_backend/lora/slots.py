"""Assignment of adapters to slots. Handles no weights and no files."""

from __future__ import annotations

from collections.abc import Collection

from rbln_backend.errors import AdapterError

INPUT_NAME = "lora_slots"
"""The graph input that holds the slot of each request; see ``RowInput``."""
NO_ADAPTER = -1
"""The slot of rows without an adapter, and of padding."""


class Slots:
    """``max_loras`` slots.

    An adapter that was added stays until it is removed. One that came with a request, as in offline
    engines, is evicted once no request in a batch uses it, the least recently used first.
    """

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._count = count
        self._slot_of: dict[int, int] = {}
        # Adapters that came with requests; the least recently used first.
        self._passing: dict[int, None] = {}

    def __contains__(self, lora_int_id: int) -> bool:
        return lora_int_id in self._slot_of

    def __len__(self) -> int:
        return len(self._slot_of)

    def __getitem__(self, lora_int_id: int) -> int:
        """The slot; raises ``KeyError`` for an adapter that is in none."""
        return self._slot_of[lora_int_id]

    def as_dict(self) -> dict[int, int]:
        """Slots by adapter."""
        return dict(self._slot_of)

    def reserve(self, lora_int_id: int, in_use: Collection[int], *, passing: bool) -> int:
        """A slot for an adapter that has none; raises ``AdapterError`` when all are taken.

        ``in_use`` are the adapters of requests in a batch.
        """
        slot = self._free.pop() if self._free else self._evict(in_use)
        self._slot_of[lora_int_id] = slot
        if passing:
            self._passing[lora_int_id] = None
        return slot

    def keep(self, lora_int_id: int) -> None:
        """Keep an adapter until it is removed."""
        self._passing.pop(lora_int_id, None)

    def touch(self, lora_int_id: int) -> None:
        """Note that an adapter is used."""
        if lora_int_id in self._passing:
            del self._passing[lora_int_id]
            self._passing[lora_int_id] = None

    def release(self, lora_int_id: int) -> bool:
        """Free an adapter's slot; whether it had one."""
        slot = self._slot_of.pop(lora_int_id, None)
        if slot is None:
            return False
        self._passing.pop(lora_int_id, None)
        self._free.append(slot)
        return True

    def _evict(self, in_use: Collection[int]) -> int:
        for candidate in self._passing:
            if candidate not in in_use:
                self.release(candidate)
                return self._free.pop()
        raise AdapterError(
            f"all {self._count} adapter slots are taken (--max-loras {self._count}); "
            "remove an adapter first"
        )
