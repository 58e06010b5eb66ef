"""Planned memory of a server on this host; plain data and arithmetic, no torch, no vLLM."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

_MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReport:
    """Estimated bytes by use; `source` names the limit behind `total_bytes`.

    A block holds `block_tokens` tokens of every full-attention layer in `block_bytes`.
    """

    total_bytes: int
    available_bytes: int
    source: str
    process_bytes: int
    weight_bytes: int
    packing_bytes: int
    lora_bytes: int
    workspace_bytes: int
    window_bytes: int
    block_bytes: int
    block_tokens: int
    num_blocks: int
    max_model_len: int
    max_num_seqs: int
    problems: tuple[str, ...] = ()

    @property
    def kv_bytes(self) -> int:
        """Bytes of the paged KV cache and of window layers."""
        return self.num_blocks * self.block_bytes + self.window_bytes

    @property
    def needed_bytes(self) -> int:
        """Sum of all uses."""
        parts = (self.process_bytes, self.weight_bytes, self.packing_bytes, self.lora_bytes)
        return sum(parts) + self.workspace_bytes + self.kv_bytes

    @property
    def longest_requests(self) -> float | None:
        """Requests of `max_model_len` tokens that the blocks hold; None without such layers."""
        if not self.block_bytes or not self.num_blocks:
            return None
        # Block 0 holds no request.
        blocks = -(-self.max_model_len // self.block_tokens)
        return (self.num_blocks - 1) / blocks

    def warnings(self) -> list[str]:
        """Return limitations that the user may not expect."""
        held = self.longest_requests
        if held is None or held >= self.max_num_seqs or self.problems:
            return []
        return [
            f"the KV cache holds {held:.1f} requests of --max-model-len {self.max_model_len}, "
            f"and --max-num-seqs is {self.max_num_seqs}: where prompts are long, requests wait or "
            "are computed again; lower one of them or give more --kv-cache-memory-bytes"
        ]

    def to_dict(self) -> dict[str, object]:
        """Return all fields as JSON values."""
        sums = {"kv_bytes": self.kv_bytes, "needed_bytes": self.needed_bytes}
        return {**dataclasses.asdict(self), **sums, "longest_requests": self.longest_requests}

    def lines(self) -> list[tuple[str, str]]:
        """Return names and values to print, one per line."""
        adapters = [("  adapters", _mib(self.lora_bytes))] if self.lora_bytes else []
        windows = [("  windows", _mib(self.window_bytes))] if self.window_bytes else []
        return [
            (
                "memory",
                f"about {_mib(self.needed_bytes)} of {_mib(self.available_bytes)} free "
                f"({self.source}: {_mib(self.total_bytes)})",
            ),
            ("  process", _mib(self.process_bytes)),
            ("  weights", f"{_mib(self.weight_bytes)}, {_mib(self.packing_bytes)} more packed"),
            *adapters,
            ("  workspace", _mib(self.workspace_bytes)),
            *windows,
            *self._blocks(),
        ]

    def _blocks(self) -> list[tuple[str, str]]:
        if not self.block_bytes:
            return []
        held = self.longest_requests
        longest = "" if held is None else f", {held:.1f} longest requests"
        size = f"{self.num_blocks} blocks of {self.block_tokens} tokens, {self.block_bytes:,} bytes"
        total = self.num_blocks * self.block_bytes
        return [("  KV blocks", f"{_mib(total)}: {size} each{longest}")]


def _mib(size: int) -> str:
    return f"{size / _MIB:,.0f} MiB"
