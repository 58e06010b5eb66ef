"""`ChunkPlan`: divides prompts into compiled chunks with the least computed padding.

With chunks of 16, 32, 64, 128 and 256, a prompt of 130 tokens runs as 128 and then 2 in a chunk of
16 where padding is computed. That computes 144 tokens; the smallest chunk that holds all of them
would compute 256.

Where a chunk may hold several prompts, eight of 32 tokens run as one chunk of 256: each step has a
fixed cost, and a mixture of experts reads nearly all of its weights in each step.
"""

from __future__ import annotations

from collections.abc import Sequence

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.errors import BucketError

TOKENS_PER_PROMPT = 16
"""Tokens of a chunk per prompt that it may hold; each prompt computes a row of the LM head."""

DENSE_STEP_TOKENS = 16


def step_tokens_of(experts: int, chosen: int) -> int:
    """Return the fixed cost of a step of the emulated device, in tokens, where padding is computed.

    A step reads the weights of all `experts`; a token is multiplied by those of `chosen` experts
    only. 0 of either: the model is dense, or does not declare it.
    """
    return DENSE_STEP_TOKENS * (max(1, experts // chosen) if chosen else 1)


def prompts_of(chunk: int, most: int) -> int:
    """Return the number of prompts that a chunk of `chunk` tokens can hold, at most `most`."""
    return max(1, min(most, chunk // TOKENS_PER_PROMPT))


def room_of(tokens: int, prompts: int) -> int:
    """Return the smallest chunk that holds `tokens` tokens of `prompts` prompts."""
    return tokens if prompts == 1 else max(tokens, prompts * TOKENS_PER_PROMPT)


class ChunkPlan:
    """Next chunk for every remaining length of a prompt, and prompts that share a chunk.

    `step_tokens` is the fixed cost of a step in tokens, for work such as reading the weights. The
    larger it is, the fewer prompts are cut, and the more share a chunk; with that of the largest
    chunk none that fits is cut, as is best where padding is not computed.
    """

    def __init__(self, table: BucketTable, step_tokens: int, prompts: int = 1) -> None:
        """`prompts` is the limit per chunk. Raises `BucketError` for negative `step_tokens`."""
        if step_tokens < 0:
            raise BucketError(f"A step cannot cost less than its tokens, got {step_tokens}")
        self.prompts = prompts
        self._table, self._step_tokens = table, step_tokens
        self.largest = table.largest
        # By remaining tokens: their cost, and the tokens of the first step.
        costs, self._first = [0, 0], [0, 1]
        for left in range(2, table.largest + 1):
            choices = [(table.find(left) + step_tokens, -left)]
            # A single remaining token joins a decode batch and costs no chunk.
            choices += [
                (size + step_tokens + costs[left - size], -size) for size in table if size < left
            ]
            cost, taken = min(choices)
            costs.append(cost)
            self._first.append(-taken)
        self._costs = costs

    def bucket(self, tokens: int) -> int:
        """Return the compiled size of a chunk of so many tokens."""
        return self._table.find(min(tokens, self.largest))

    def next_chunk(self, left: int) -> int:
        """Return the tokens of the next step for `left` >= 1 remaining tokens."""
        return self._first[left] if left <= self.largest else self.largest

    def together(self, left: Sequence[int]) -> int:
        """Return the number of leading prompts that the next step should compute whole.

        `left` has the remaining tokens of each prompt, >= 1. Returns 1 if sharing saves nothing.
        """
        best, saved = 1, 0
        total = apart = 0
        for count, tokens in enumerate(left[: self.prompts], 1):
            total += tokens
            room = room_of(total, count)
            if room > self.largest:
                break
            # A single token needs no chunk, but a step.
            apart += self._costs[tokens] or self._step_tokens
            gain = apart - self._table.find(room) - self._step_tokens
            if gain > saved:
                best, saved = count, gain
        return best
