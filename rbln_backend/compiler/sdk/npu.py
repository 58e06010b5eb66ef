"""Properties of RBLN NPUs by product name; none was measured by this project.

Source: the vendor's vllm-rbln 0.12 (platform, worker utilities, attention). A name that it does
not tell apart is treated as the oldest kind that it knows.
"""

from __future__ import annotations

from dataclasses import dataclass

from rbln_backend.errors import ConfigError

_GIB = 1 << 30
_MIB = 1 << 20

RUNTIME_BYTES = 256 * _MIB
"""Bytes that a compiled graph reserves on each chiplet, by the vendor's estimate."""


@dataclass(frozen=True, slots=True)
class Npu:
    """One NPU, e.g. RBLN-CR13."""

    name: str
    memory_bytes: int
    """Bytes of its memory that programs can use."""
    chiplets: int
    """Parts that each hold a share of every tensor and a runtime of every graph."""
    appends_windows: bool
    """Sliding windows lie in pages; otherwise a window is one block whose content is shifted."""
    stores_across_blocks: bool
    """A chunk of a prompt may begin in one block and end in the next."""
    wants_longest_first: bool
    """Decode kernels skip the rows after the last one that reaches into a block."""
    splits_tensors: bool
    """A rank may be given several."""

    @classmethod
    def named(cls, name: str) -> Npu:
        """Raises ``ConfigError`` for a name that is no RBLN NPU's."""
        model = name.strip().upper()
        if model.startswith("RBLN-CA"):
            return cls(model, 16 * _GIB - 288 * _MIB, 1, False, False, False, True)
        if model.startswith("RBLN-CR"):
            newest = model == "RBLN-CR13"
            return cls(model, 140 * _GIB, 4, newest, newest, newest, False)
        raise ConfigError(
            f"NPU name {name!r} is not known; names begin with RBLN-CA (ATOM) or RBLN-CR (REBEL)"
        )


@dataclass(frozen=True, slots=True)
class RankMemory:
    """The memory of the NPUs of one rank, as the vendor estimates what it goes into."""

    npu: Npu
    devices: int
    num_graphs: int
    num_kv_heads: int
    """Of the rank."""

    @property
    def total_bytes(self) -> int:
        return self.npu.memory_bytes * self.devices

    @property
    def runtime_bytes(self) -> int:
        """Bytes that all graphs reserve."""
        return RUNTIME_BYTES * self.num_graphs * self._parts

    @property
    def kv_copies(self) -> int:
        """Copies of each KV head: more than one if there are fewer heads than parts."""
        return max(1, self._parts // self.num_kv_heads)

    @property
    def _parts(self) -> int:
        return self.npu.chiplets * self.devices

    def adapter_bytes(self, slot_bytes: int) -> int:
        """Bytes of adapter slots of ``slot_bytes``: graphs may want their inputs on every part."""
        return slot_bytes * self._parts

    def kv_budget_bytes(self, utilization: float, weight_bytes: int, slot_bytes: int = 0) -> int:
        """Bytes for KV caches, each head counted once; may be negative.

        ``slot_bytes``: of adapters.
        """
        fixed = weight_bytes + self.runtime_bytes + self.adapter_bytes(slot_bytes)
        free = int(self.total_bytes * utilization) - fixed
        return free // self.kv_copies
