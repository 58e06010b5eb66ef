"""How a prompt is cut into compiled chunks so that as little as possible is computed for padding.

130 tokens in chunks of 16, 32, 64, 128 and 256 run as 128 and then 2 in a chunk of 16: 144 tokens
computed, where the smallest chunk that holds them all would compute 256.
"""

from __future__ import annotations

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.errors import BucketError


class ChunkPlan:
    """The next chunk for every length of what is left of a prompt.

    `step_tokens` is what a step costs besides its tokens, in tokens: work such as reading the
    weights. The larger it is, the fewer prompts are cut.
    """

    def __init__(self, table: BucketTable, step_tokens: int) -> None:
        """Raises `BucketError` when `step_tokens` is negative."""
        if step_tokens < 0:
            raise BucketError(f"A step cannot cost less than its tokens, got {step_tokens}")
        self._largest = table.largest
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

    def next_chunk(self, left: int) -> int:
        """Return how many of `left` >= 1 tokens the next step takes, the largest chunk at most."""
        return self._first[left] if left <= self._largest else self._largest
