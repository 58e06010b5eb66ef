"""Grammar masks in the worker: applied to the logits on the host, and timed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
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
            allowed = np.unpackbits(bits[row].view(np.uint8), count=width, bitorder="little")
            forbidden = torch.from_numpy(allowed).logical_not()
            logits[masked, :width].masked_fill_(forbidden, -torch.inf)
        self._seconds.observe(time.perf_counter() - started)
        return logits


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
