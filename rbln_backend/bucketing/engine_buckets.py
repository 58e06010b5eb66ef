"""All compiled sizes of an engine, derived once from its settings.

Decode buckets follow the documented strategies (vllm-rbln decode bucketing): generation starts at
the maximum, so that the largest bucket always holds a full batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from rbln_backend.bucketing.table import BucketTable
from rbln_backend.bucketing.verify import NO_DRAFTS, VerifyTable, draft_lengths
from rbln_backend.config import RblnConfig
from rbln_backend.errors import BucketError

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
