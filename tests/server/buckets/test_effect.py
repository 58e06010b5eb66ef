"""The measured effect of a change: of the phases alone whose sizes changed."""

from __future__ import annotations

from rbln_backend.bucketing.usage import Usage
from server.buckets.effect import effect_of, is_worse

OLD = {"decode": [1, 32], "prefill": [256]}
NEW = {"decode": [1, 9, 32], "prefill": [256]}


def counted(decode_bucket: int, decode_s: float, prefill_s: float) -> Usage:
    usage = Usage()
    usage.phases["decode"].note(9, decode_bucket, decode_s * 500, 500)
    usage.phases["prefill"].note(200, 256, prefill_s * 500, 500)
    return usage


def test_a_phase_with_the_same_sizes_has_no_effect() -> None:
    # Another load made the prefill ten times as long; the change had no part in it.
    before, after = counted(32, 0.32, 0.1), counted(9, 0.08, 1.0)
    effect = effect_of(before, OLD, NEW, after)
    assert effect["prefill"] is None
    assert effect["decode"] is not None
    assert effect["decode"]["saving"] == 0.75
    assert not is_worse(effect, after)
    assert effect_of(before, NEW, NEW, after) == {"decode": None, "prefill": None}
