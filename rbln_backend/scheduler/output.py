"""What the scheduler tells the workers beyond vLLM's output."""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from rbln_backend.kv_cache.transfers import WindowTransfers
from rbln_backend.vllm_compat.surface import CachedRequestData, SchedulerOutput

_NO_TRANSFERS = WindowTransfers()


@dataclass
class WindowedSchedulerOutput(SchedulerOutput):
    """A step that also moves window state."""

    window_transfers: WindowTransfers = field(default_factory=WindowTransfers)


def with_transfers(output: SchedulerOutput, transfers: WindowTransfers) -> SchedulerOutput:
    """``output`` with the moves of its step; the same object when there are none."""
    if not transfers:
        return output
    values = {item.name: getattr(output, item.name) for item in fields(output)}
    return WindowedSchedulerOutput(**values, window_transfers=transfers)


def forget_known_tokens(cached: CachedRequestData) -> None:
    """Drop tokens that the ranks have.

    Upstream sends all tokens of a request that was not in the step before, for a cache that ours
    do not need: their states live as long as the request. Only one that was preempted may have a
    token that stages before the last have not seen.
    """
    known = cached.all_token_ids
    if known:
        cached.all_token_ids = {i: known[i] for i in cached.resumed_req_ids if i in known}


def window_transfers(output: SchedulerOutput) -> WindowTransfers:
    """The moves of a step; empty for a plain output."""
    if isinstance(output, WindowedSchedulerOutput):
        return output.window_transfers
    return _NO_TRANSFERS


def merge_reports(first: SchedulerOutput, second: SchedulerOutput) -> SchedulerOutput:
    """Carry what an empty first attempt told the workers into the step that runs."""
    second.finished_req_ids = first.finished_req_ids | second.finished_req_ids
    second.free_encoder_mm_hashes = first.free_encoder_mm_hashes + second.free_encoder_mm_hashes
    if first.preempted_req_ids:
        second.preempted_req_ids = first.preempted_req_ids | (second.preempted_req_ids or set())
    if first.kv_cache_block_copies:
        later = second.kv_cache_block_copies or []
        second.kv_cache_block_copies = first.kv_cache_block_copies + later
    return second
