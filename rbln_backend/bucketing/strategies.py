"""The documented strategies that turn a maximum batch size into decode buckets.

Generation starts at the maximum, so the largest bucket always holds a full batch; `limit` is
the number of buckets counted from there and `min_batch_size` the bound of generated values
(documented: vllm-rbln decode bucketing). All functions return ascending tuples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rbln_backend.errors import BucketError


def exponential_buckets(
    max_batch_size: int, *, min_batch_size: int, limit: int, step: int
) -> tuple[int, ...]:
    """Divide by `step` from the maximum down."""
    _check(max_batch_size, min_batch_size, limit, step)
    if step <= 1:
        raise BucketError(f"For exponential bucketing, step must be greater than 1, step: {step}")
    return _descend(max_batch_size, min_batch_size, limit, lambda last: last // step)


def linear_buckets(
    max_batch_size: int, *, min_batch_size: int, limit: int, step: int
) -> tuple[int, ...]:
    """Subtract `step` from the maximum down."""
    _check(max_batch_size, min_batch_size, limit, step)
    return _descend(max_batch_size, min_batch_size, limit, lambda last: last - step)


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

    Defaults are the documented ones, hence a single bucket; `RblnConfig` passes its own.
    Raises `BucketError` naming the value and the rule it breaks.
    """
    if strategy == "exponential":
        return exponential_buckets(
            max_batch_size, min_batch_size=min_batch_size, limit=limit, step=step
        )
    if strategy == "linear":
        return linear_buckets(max_batch_size, min_batch_size=min_batch_size, limit=limit, step=step)
    if strategy == "manual":
        return manual_buckets(max_batch_size, buckets)
    raise BucketError(
        f"Invalid bucketing strategy {strategy!r}, valid choices: exponential, linear, manual"
    )


def _check(max_batch_size: int, min_batch_size: int, limit: int, step: int) -> None:
    named = {"min_batch_size": min_batch_size, "limit": limit, "step": step}
    for name, value in named.items():
        if value <= 0:
            raise BucketError(f"{name} must be greater than 0, got {value}")
    if max_batch_size < min_batch_size:
        raise BucketError(
            f"max_batch_size must be >= min_batch_size, got {max_batch_size} < {min_batch_size}"
        )


def _descend(
    largest: int, smallest: int, limit: int, next_below: Callable[[int], int]
) -> tuple[int, ...]:
    buckets = [largest]
    while len(buckets) < limit and (below := next_below(buckets[-1])) >= smallest:
        buckets.append(below)
    return tuple(reversed(buckets))
