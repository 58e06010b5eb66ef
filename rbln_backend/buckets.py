"""All compiled sizes of an engine, derived once from its settings, and the look-ups of a step.

`BucketTable`: sizes are positive, unique and ascending; `find` returns the smallest that holds n.
`VerifyTable` has the sizes of decode steps that check drafts, requests by tokens. Decode buckets
follow the documented strategies (vllm-rbln decode bucketing): generation starts at the maximum, so
that the largest bucket always holds a full batch.

`ChunkPlan` divides prompts into compiled chunks with the least computed padding. With chunks of 16,
32, 64, 128 and 256, a prompt of 130 tokens runs as 128 and then 2 in a chunk of 16 where padding is
computed. That computes 144 tokens; the smallest chunk that holds all of them would compute 256.
Where a chunk may hold several prompts, eight of 32 tokens run as one chunk of 256: each step has a
fixed cost, and a mixture of experts reads nearly all of its weights in each step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from rbln_backend.config import RblnConfig
from rbln_backend.errors import BucketError

DEFAULT_CHUNK_TOKENS = 256
"""Default tokens of the largest chunk: it keeps the time between tokens short."""

DEFAULT_MAX_NUM_SEQS = 32
"""Default requests that run at once: their buckets compile in seconds."""


@dataclass(frozen=True, slots=True)
class BucketTable:
    """Compiled sizes, ascending. Raises `BucketError` when they are not."""

    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.sizes:
            raise BucketError("A bucket table needs at least one bucket")
        if self.sizes[0] < 1:
            raise BucketError(f"Buckets must be greater than 0, got {list(self.sizes)}")
        if any(left >= right for left, right in zip(self.sizes, self.sizes[1:], strict=False)):
            raise BucketError(f"Buckets must be unique and ascending, got {list(self.sizes)}")

    def __iter__(self) -> Iterator[int]:
        return iter(self.sizes)

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def largest(self) -> int:
        """The largest bucket, which is also the largest size that can run."""
        return self.sizes[-1]

    def find(self, n: int) -> int:
        """Return the smallest bucket >= n; `BucketError` if n < 1 or n > the largest."""
        if n < 1 or n > self.sizes[-1]:
            raise BucketError(
                f"No batch bucket found for batch size {n}; buckets are {list(self.sizes)}"
            )
        return self.sizes[bisect_left(self.sizes, n)]


TOKENS_PER_PROMPT = 16
"""Tokens of a chunk per prompt that it may hold; each prompt computes a row of the LM head."""

DENSE_STEP_TOKENS = 16


def get_step_tokens(experts: int, chosen: int) -> int:
    """Return the fixed cost of a step of the emulated device, in tokens, where padding is computed.

    A step reads the weights of all `experts`; a token is multiplied by those of `chosen` experts
    only. 0 of either: the model is dense, or does not declare it.
    """
    return DENSE_STEP_TOKENS * (max(1, experts // chosen) if chosen else 1)


def get_prompts(chunk: int, most: int) -> int:
    """Return the number of prompts that a chunk of `chunk` tokens can hold, at most `most`."""
    return max(1, min(most, chunk // TOKENS_PER_PROMPT))


def get_padded_size(tokens: int, prompts: int) -> int:
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
            room = get_padded_size(total, count)
            if room > self.largest:
                break
            # A single token needs no chunk, but a step.
            apart += self._costs[tokens] or self._step_tokens
            gain = apart - self._table.find(room) - self._step_tokens
            if gain > saved:
                best, saved = count, gain
        return best


Size = tuple[int, int]
"""Size of a decode step: requests, and tokens of each."""


class VerifyTable:
    """Lengths by decode bucket: the tokens that a step can take of each of its requests.

    A length counts a request's latest token and its drafts; length 1 checks no drafts and is not
    in the table. The cost of a step grows with all its tokens: larger buckets have fewer lengths.
    """

    def __init__(
        self, buckets: BucketTable | None, lengths: Sequence[int], max_tokens: int
    ) -> None:
        """`max_tokens` bounds a step over all requests. Raises `BucketError`."""
        if any(length < 2 for length in lengths):
            raise BucketError(f"A step that checks drafts takes 2 tokens or more, got {lengths}")
        self._buckets = buckets
        self._lengths: Mapping[int, tuple[int, ...]] = {
            bucket: tuple(n for n in sorted(lengths) if bucket * n <= max_tokens)
            for bucket in buckets or ()
        }

    def __iter__(self) -> Iterator[Size]:
        return ((bucket, n) for bucket, lengths in self._lengths.items() for n in lengths)

    @property
    def buckets(self) -> tuple[int, ...]:
        """Decode buckets, in requests."""
        return self._buckets.sizes if self._buckets is not None else ()

    def sizes(self, requests: int) -> tuple[Size, ...]:
        """Return the sizes for `requests`, shortest first; none above the largest bucket."""
        if self._buckets is None or requests > self._buckets.largest:
            return ()
        bucket = self._buckets.find(requests)
        return ((bucket, 1), *((bucket, length) for length in self._lengths[bucket]))

    def longest(self, requests: int, room: int) -> int:
        """Return the most tokens per request in a step of `requests`, at most `room`; at least 1.

        A bucket's lengths are compiled: a step of `n` tokens may have to take more of them.
        """
        return max((n for _, n in self.sizes(requests) if n <= room), default=1)

    def find(self, requests: int, tokens: int) -> Size:
        """Return the smallest size for `tokens` of each of `requests`; raises `BucketError`."""
        for size in self.sizes(requests):
            if tokens <= size[1]:
                return size
        raise BucketError(
            f"No step checks {tokens} tokens of each of {requests} requests; sizes are {list(self)}"
        )


NO_DRAFTS = VerifyTable(None, (), 0)
"""Table of an engine without speculation."""


def draft_lengths(configured: Sequence[int] | None, num_drafts: int) -> tuple[int, ...]:
    """Return the lengths for at most `num_drafts` drafts: by default powers of two and the maximum.

    Raises `BucketError` if the configured lengths do not end at `num_drafts` + 1.
    """
    most = num_drafts + 1
    if configured is None:
        return (*(1 << n for n in range(1, most.bit_length()) if 1 << n < most), most)
    if configured[-1] != most:
        raise BucketError(
            f"last verify length {configured[-1]} (verify_lengths={list(configured)}) must be "
            f"num_speculative_tokens and one: {most}"
        )
    return tuple(configured)


MIN_DERIVED_CHUNK = 16
"""Smallest chunk in tokens worth its own graph when the chunks are derived."""

DEFAULT_VERIFY_TOKENS = 64
"""Largest number of tokens of a step that checks drafts, over all requests."""

MAX_DERIVED_CHUNKS = 6
"""Largest number of derived chunk sizes, the chunk included."""


EAGLE = "eagle"
EAGLE3 = "eagle3"
MTP = "mtp"
DRAFT_LAYERS = (EAGLE, EAGLE3, MTP)
"""vLLM's names of the methods whose draft model is a layer with a KV cache."""


@dataclass(frozen=True, slots=True)
class DraftSizes:
    """Sizes of a draft model's graphs."""

    requests: BucketTable
    """Requests of a run."""
    chunks: BucketTable
    """Tokens of a prefill chunk, for a draft model with a KV cache."""
    length: int | None
    """Tokens of each request that a step can add to that cache; None: there is no cache."""


@dataclass(frozen=True, slots=True)
class EngineBuckets:
    """The compiled sizes of one engine."""

    chunks: BucketTable
    """Tokens of a prefill chunk, or of a step of a model that pools."""
    decode: BucketTable | None = None
    """Requests of a decode step; None for a model that pools."""
    verify: VerifyTable = NO_DRAFTS
    """Sizes of decode steps that check drafts."""
    drafted: DraftSizes | None = None
    """Sizes of the draft model's graphs; None without a draft model."""

    @classmethod
    def derive(
        cls,
        config: RblnConfig,
        chunk_tokens: int,
        requests: int | None,
        drafts: int | None = None,
        *,
        draft_model: str | None = None,
    ) -> EngineBuckets:
        """Derive all sizes up to `chunk_tokens` and `requests`; raises `BucketError`.

        `requests` is `max_num_seqs` divided by the pipeline stages, None for a model that pools.
        `drafts` is `num_speculative_tokens`, None without speculation; `draft_model` the method of
        a draft model, None without one.
        """
        chunks = prefill_chunk_table(config, chunk_tokens)
        if requests is None:
            return cls(chunks)
        buckets = cls(chunks, decode_bucket_table(config, requests))
        if drafts is None:
            return buckets
        lengths = draft_lengths(config.verify_lengths, drafts)
        # vLLM's scheduler gives no step more tokens than a chunk has.
        tokens = min(config.verify_tokens or DEFAULT_VERIFY_TOKENS, chunk_tokens)
        verify = VerifyTable(buckets.decode, lengths, tokens)
        if draft_model is None or buckets.decode is None:
            return replace(buckets, verify=verify)
        length = drafts + 1 if draft_model in DRAFT_LAYERS else None
        return replace(buckets, verify=verify, drafted=DraftSizes(buckets.decode, chunks, length))


def decode_bucket_table(config: RblnConfig, max_batch_size: int) -> BucketTable:
    """Return the decode buckets, in requests; `RblnConfig` has checked each setting.

    From `max_batch_size` down, `exponential` divides by the step and `linear` subtracts it, until
    the minimum or the limit of buckets is reached. Raises `BucketError` when the configured sizes
    cannot end at `max_batch_size`.
    """
    if config.decode_batch_bucket_strategy == "manual":
        table = BucketTable(config.decode_batch_bucket_manual_buckets)
        if table.largest != max_batch_size:
            raise BucketError(
                f"last manual bucket {table.largest} must equal max_batch_size {max_batch_size} "
                "(max_num_seqs divided by the pipeline stages)"
            )
        return table
    smallest, step = config.decode_batch_bucket_min, config.decode_batch_bucket_step
    if max_batch_size < smallest:
        raise BucketError(
            f"max_batch_size must be >= min_batch_size, got {max_batch_size} < {smallest}"
        )
    is_exponential = config.decode_batch_bucket_strategy == "exponential"
    found: list[int] = []
    size = max_batch_size
    while size >= smallest and len(found) < config.decode_batch_bucket_limit:
        found.append(size)
        size = size // step if is_exponential else size - step
    return BucketTable(tuple(reversed(found)))


def prefill_chunk_table(config: RblnConfig, max_num_batched_tokens: int) -> BucketTable:
    """Return the prefill chunk sizes, in tokens; the largest is `max_num_batched_tokens`.

    Unless configured they are the chunk and its halves, at most six sizes and none below 16 tokens
    except the chunk itself: no prompt longer than the smallest runs in twice its length.
    Raises `BucketError` when configured sizes do not end at `max_num_batched_tokens`.
    """
    if max_num_batched_tokens < 1:
        raise BucketError(
            f"max_num_batched_tokens must be greater than 0, got {max_num_batched_tokens}"
        )
    configured = config.prefill_chunk_buckets
    if configured is None:
        halves = [max_num_batched_tokens >> n for n in range(1, MAX_DERIVED_CHUNKS)]
        smaller = sorted(size for size in halves if size >= MIN_DERIVED_CHUNK)
        return BucketTable((*smaller, max_num_batched_tokens))
    if configured[-1] != max_num_batched_tokens:
        raise BucketError(
            f"last prefill chunk bucket {configured[-1]} (prefill_chunk_buckets="
            f"{list(configured)}) must equal max_num_batched_tokens {max_num_batched_tokens}"
        )
    return BucketTable(configured)
