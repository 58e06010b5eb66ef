"""The documented strategies that turn a maximum batch size into decode buckets.

Generation starts at the maximum, so the largest bucket always holds a full batch; `limit` is
the number of buckets counted from there and `min_batch_size` the bound of generated values
(documented: vllm-rbln decode bucketing). All functions return ascending tuples.
"""

from __future__ import annotations

from collections.abc import Sequence

from rbln_backend.errors import BucketError


def decode_batch_buckets(
    strategy: str,
    max_batch_size: int,
    *,
    min_batch_size: int = 1,
    limit: int = 1,
    step: int = 2,
    buckets: Sequence[int] = (),
) -> tuple[int, ...]:
    """Return the ascending decode buckets of a strategy named as in the configuration.

    From the maximum down, `exponential` divides by `step` and `linear` subtracts it. Defaults are
    the documented ones, hence a single bucket; `RblnConfig` passes its own. Raises `BucketError`
    naming the value and the rule it breaks.
    """
    if strategy == "manual":
        return manual_buckets(max_batch_size, buckets)
    if strategy not in ("exponential", "linear"):
        raise BucketError(
            f"Invalid bucketing strategy {strategy!r}, valid choices: exponential, linear, manual"
        )
    for name, value in {"min_batch_size": min_batch_size, "limit": limit, "step": step}.items():
        if value <= 0:
            raise BucketError(f"{name} must be greater than 0, got {value}")
    if max_batch_size < min_batch_size:
        raise BucketError(
            f"max_batch_size must be >= min_batch_size, got {max_batch_size} < {min_batch_size}"
        )
    if strategy == "exponential" and step <= 1:
        raise BucketError(f"For exponential bucketing, step must be greater than 1, step: {step}")
    found: list[int] = []
    size = max_batch_size
    while size >= min_batch_size and len(found) < limit:
        found.append(size)
        size = size // step if strategy == "exponential" else size - step
    return tuple(reversed(found))


def manual_buckets(max_batch_size: int, buckets: Sequence[int]) -> tuple[int, ...]:
    """Take the given buckets; the largest must equal `max_batch_size`."""
    if not buckets:
        raise BucketError("manual_buckets must be non-empty")
    ordered = tuple(sorted(set(buckets)))
    if ordered[0] < 1:
        raise BucketError(f"manual_buckets must all be > 0, got {list(ordered)}")
    if ordered[-1] != max_batch_size:
        raise BucketError(
            f"last manual bucket {ordered[-1]} must equal max_batch_size {max_batch_size} "
            "(max_num_seqs divided by the pipeline stages)"
        )
    return ordered
