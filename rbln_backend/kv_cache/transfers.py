"""Copies of KV that belong to a step, decided by the scheduler."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


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


class HeadCopy(NamedTuple):
    """Before the step: copy the first tokens of a shared block into a request's own block.

    Two fields have the names of vLLM's ``KVCacheBlockCopy``, in whose place it stands.
    """

    src_block_id: int
    dst_block_id: int
    group: int
    num_tokens: int


class PagePart(NamedTuple):
    """Tokens that lie together in each layer of a KV cache group."""

    group: int
    block: int
    """A block of a paged group, a page of the log of a window group."""
    slot: int
    """The first token in it."""
    tokens: int


@dataclass(frozen=True)
class PageMove:
    """A page of tokens of some groups, between the KV cache and host memory."""

    page: Tensor
    """Bytes [page_bytes]: K and V of each layer of each part."""
    parts: Sequence[PagePart]


@dataclass
class PageMoves:
    """All pages of one step. Loads run before everything else of it, stores after it."""

    loads: list[PageMove] = field(default_factory=list)
    stores: list[PageMove] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.loads or self.stores)
