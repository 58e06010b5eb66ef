"""Grammar masks in the worker: applied to the logits on the host, and timed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rbln_backend.reporting.stats import MetricsBoard
from rbln_backend.vllm_compat.surface import GrammarOutput, InputBatch, SchedulerOutput


class GrammarMask:
    """Masks the rows of requests with a grammar, ``rbln_grammar_mask_seconds{part="apply"}``."""

    def __init__(self, board: MetricsBoard) -> None:
        self._seconds = board.histogram("rbln_grammar_mask_seconds", part="apply")

    def apply(
        self, scheduled: SchedulerOutput, grammar: GrammarOutput, batch: InputBatch, logits: Tensor
    ) -> Tensor:
        """Return ``logits`` ([num_reqs, V], changed), -inf where a grammar forbids the token."""
        started = time.perf_counter()
        bits = grammar.grammar_bitmask
        # Masks may be padded to whole words, or logits to a multiple of a tile.
        width = min(bits.shape[1] * 32, logits.shape[1])
        for row, masked in _rows(scheduled, grammar, batch):
            if (bits[row] == -1).all():
                continue
            _forbid(logits[masked, :width], bits[row])
        self._seconds.observe(time.perf_counter() - started)
        return logits


def _forbid(logits: Tensor, bits: npt.NDArray[np.int32]) -> None:
    """Set ``logits`` [width] to -inf where the bit of ``bits`` is clear.

    A table has eight words for each byte of the mask; the rest are operations on whole vectors. A
    loop over single elements, as in PyTorch's ``masked_fill_``, takes several times as long.
    """
    kept, lowest = _tables(logits.dtype)
    words = logits.view(torch.int32 if logits.itemsize == 4 else torch.int16).numpy()
    keep = kept.take(bits.view(np.uint8), axis=0).reshape(-1)[: len(words)]
    words &= keep
    np.invert(keep, out=keep)
    keep &= lowest
    words |= keep


@cache
def _tables(dtype: torch.dtype) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Return the words of each byte, [256, 8] of -1 for set bits and 0, and -inf as a word."""
    lowest = torch.tensor(-torch.inf, dtype=dtype)
    word = torch.int32 if lowest.itemsize == 4 else torch.int16
    bits = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    return (-torch.from_numpy(bits).to(word)).numpy(), lowest.view(word).numpy()


def _rows(
    scheduled: SchedulerOutput, grammar: GrammarOutput, batch: InputBatch
) -> Iterator[tuple[int, int]]:
    """Yield the rows of the masks, each with its row of the logits.

    Both have a row for each draft of a request behind its first one.
    """
    drafts = scheduled.scheduled_spec_decode_tokens
    places = batch.req_id_to_index
    starts = list(range(len(places)))
    if drafts:
        lengths = [1 + len(drafts.get(name, ())) for name in batch.req_ids]
        starts = np.concatenate(([0], np.cumsum(lengths))).tolist()
    first = 0
    for name in grammar.structured_output_request_ids:
        count = 1 + len(drafts.get(name, ()))
        place = places.get(name)
        if place is not None:
            start = starts[place]
            yield from zip(range(first, first + count), range(start, start + count), strict=True)
        first += count
