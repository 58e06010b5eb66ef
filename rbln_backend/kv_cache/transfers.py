"""Copies between window blocks and the prefix log in one step, decided by the scheduler."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class WindowRestore:
    """Before the step: fill a request's window block with the tokens before ``num_tokens``."""

    group: int
    block: int
    pages: tuple[int, ...]
    """Log pages in order; the last one ends at ``num_tokens``."""
    num_tokens: int


@dataclass(frozen=True)
class WindowStore:
    """After the step: copy one page of tokens, which starts at ``slot`` of a window block."""

    group: int
    block: int
    slot: int
    page: int


@dataclass
class WindowTransfers:
    """All copies of one step. Restores run before the forward pass, stores after it."""

    restores: list[WindowRestore] = field(default_factory=list)
    stores: list[WindowStore] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.restores or self.stores)
