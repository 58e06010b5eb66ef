"""Sampled tokens of a batch's requests as one tensor, without reading whole lists every step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

# Lists that are kept beside those of a step: another batch may have its turn in between.
_OTHERS = 16


@dataclass(slots=True)
class _Copy:
    """A request's list, which only grows, and its tokens so far."""

    source: list[int]
    tokens: NDArray[np.int32] = field(default_factory=lambda: np.empty(64, dtype=np.int32))
    count: int = 0

    def updated(self) -> NDArray[np.int32]:
        """Return the tokens [len(source)]."""
        count = len(self.source)
        if count < self.count or (self.count and self.source[self.count - 1] != self._latest()):
            self.count = 0
        if count > len(self.tokens):
            self.tokens = np.resize(self.tokens, 2 * count)
        self.tokens[self.count : count] = self.source[self.count :]
        self.count = count
        return self.tokens[:count]

    def _latest(self) -> int:
        return int(self.tokens[self.count - 1])


class OutputTokens:
    """Copies of the lists that it was given, by list: each step only new tokens are read."""

    def __init__(self) -> None:
        self._copies: dict[int, _Copy] = {}

    def joined(self, lists: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
        """Return the tokens of all lists, int32, and where each one's end, int64 [lists]."""
        if len(self._copies) > 2 * len(lists) + _OTHERS:
            self._copies.clear()
        parts = [self._copy(tokens).updated() for tokens in lists]
        ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        return torch.from_numpy(np.concatenate(parts)), torch.from_numpy(ends)

    def _copy(self, tokens: list[int]) -> _Copy:
        # The copy holds its list, so that no other one gets its identity.
        copy = self._copies.get(id(tokens))
        if copy is None:
            copy = self._copies[id(tokens)] = _Copy(tokens)
        return copy
