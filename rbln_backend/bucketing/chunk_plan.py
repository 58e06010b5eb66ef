"""How a prompt is cut into compiled chunks so that as little as possible is computed for padding.

130 tokens in chunks of 16, 32, 64, 128 and 256 run as 128 and then 2 in a chunk of 16: 144 tokens
computed, where the smallest chunk that holds them all would compute 256.

Where a chunk may hold several prompts, eight of 32 tokens run as one chunk of 256: each step costs
something besides its tokens, and a mixture of experts reads nearly all of its weights in each.
"""

from __future__ import annotations

from collections.abc import Sequence

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.errors import BucketError

TOKENS_PER_PROMPT = 16
"""Of a chunk, for each prompt that it may hold: a row of the LM head is computed for each."""

DENSE_STEP_TOKENS = 16


def step_tokens_of(experts: int, chosen: int) -> int:
    """Return what a step of the emulated device costs besides its tokens, in tokens.

    A step reads the weights of all `experts`, a token is multiplied by those of the `chosen` ones
    alone. 0 of either: the model is dense, or does not say.
    """
    return DENSE_STEP_TOKENS * (max(1, experts // chosen) if chosen else 1)


def prompts_of(chunk: int, most: int) -> int:
    """Return how many prompts a chunk of so many tokens can hold, `most` where it is large."""
    return max(1, min(most, chunk // TOKENS_PER_PROMPT))


def room_of(tokens: int, prompts: int) -> int:
    """Return the smallest chunk that holds so many tokens of so many prompts."""
    return tokens if prompts == 1 else max(tokens, prompts * TOKENS_PER_PROMPT)


class ChunkPlan:
    """The next chunk for every length of what is left of a prompt, and prompts that share one.

    `step_tokens` is what a step costs besides its tokens, in tokens: work such as reading the
    weights. The larger it is, the fewer prompts are cut, and the more are put together.
    """

    def __init__(self, table: BucketTable, step_tokens: int, prompts: int = 1) -> None:
        """`prompts`: of a large chunk. Raises `BucketError` when `step_tokens` is negative."""
        if step_tokens < 0:
            raise BucketError(f"A step cannot cost less than its tokens, got {step_tokens}")
        self.prompts = prompts
        self._table, self._step_tokens = table, step_tokens
        self.largest = table.largest
        # By tokens left: what they cost, and how many the first step takes.
        costs, self._first = [0, 0], [0, 1]
        for left in range(2, table.largest + 1):
            choices = [(table.find(left) + step_tokens, -left)]
            # One token that is left joins a decode batch: it costs no chunk.
            choices += [
                (size + step_tokens + costs[left - size], -size) for size in table if size < left
            ]
            cost, taken = min(choices)
            costs.append(cost)
            self._first.append(-taken)
        self._costs = costs

    def next_chunk(self, left: int) -> int:
        """Return how many of `left` >= 1 tokens the next step takes, the largest chunk at most."""
        return self._first[left] if left <= self.largest else self.largest

    def together(self, left: Sequence[int]) -> int:
        """Return how many prompts, the first ones, the next step should take whole.

        `left` is what each still lacks, >= 1. 1 where the first is better off by itself.
        """
        best, saved = 1, 0
        total = apart = 0
        for count, tokens in enumerate(left[: self.prompts], 1):
            total += tokens
            room = room_of(total, count)
            if room > self.largest:
                break
            # A single token takes a step, too, if no chunk.
            apart += self._costs[tokens] or self._step_tokens
            gain = apart - self._table.find(room) - self._step_tokens
            if gain > saved:
                best, saved = count, gain
        return best
