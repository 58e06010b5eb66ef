"""Additions to the step that vLLM's scheduler sends to the workers, and to its result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import cast

from rbln_backend.kv_cache.transfers import HeadCopy, PageMoves, WindowTransfers
from rbln_backend.vllm_compat.surface import (
    CachedRequestData,
    DraftTokenIds,
    ModelRunnerOutput,
    SchedulerOutput,
)

_NO_TRANSFERS = WindowTransfers()
_NO_PAGES = PageMoves()


@dataclass
class MovingSchedulerOutput(SchedulerOutput):
    """Scheduler output of a step that also moves window state or pages of KV tiers."""

    window_transfers: WindowTransfers = field(default_factory=WindowTransfers)
    page_moves: PageMoves = field(default_factory=PageMoves)


@dataclass
class DraftedOutput(ModelRunnerOutput):
    """The result of a step with the drafts of its own requests.

    With pipeline stages other steps are in progress, so that drafts belong to a step.
    """

    drafts: DraftTokenIds | None = None


def with_drafts(output: ModelRunnerOutput, drafts: DraftTokenIds | None) -> ModelRunnerOutput:
    """Return ``output`` with the drafts of its requests; the same object when there are none."""
    if drafts is None:
        return output
    values = {item.name: getattr(output, item.name) for item in fields(output)}
    return DraftedOutput(**values, drafts=drafts)


def with_transfers(
    output: SchedulerOutput, transfers: WindowTransfers, pages: PageMoves = _NO_PAGES
) -> SchedulerOutput:
    """Return ``output`` with the moves of its step; the same object when there are none."""
    if not transfers and not pages:
        return output
    values = {item.name: getattr(output, item.name) for item in fields(output)}
    return MovingSchedulerOutput(**values, window_transfers=transfers, page_moves=pages)


def forget_known_tokens(cached: CachedRequestData) -> None:
    """Drop tokens that the ranks already have.

    Upstream sends all tokens of a request that was not in the previous step. Our ranks keep the
    state of a request until it ends. Only a preempted request may have a token that the stages
    before the last have not seen.
    """
    known = cached.all_token_ids
    if known:
        cached.all_token_ids = {i: known[i] for i in cached.resumed_req_ids if i in known}


def window_transfers(output: SchedulerOutput) -> WindowTransfers:
    """Return the moves of window state of a step; empty for a plain output."""
    if isinstance(output, MovingSchedulerOutput):
        return output.window_transfers
    return _NO_TRANSFERS


def page_moves(output: SchedulerOutput) -> PageMoves:
    """Return the pages of KV tiers that a step moves; empty for a plain output."""
    return output.page_moves if isinstance(output, MovingSchedulerOutput) else _NO_PAGES


def head_copies(output: SchedulerOutput) -> Sequence[HeadCopy]:
    """Return the heads of blocks that a step copies; ``RblnKvCacheManager`` has made them."""
    return cast("Sequence[HeadCopy]", output.kv_cache_block_copies or ())


def moves_kv(output: SchedulerOutput) -> bool:
    """Return whether a step copies KV besides computing it."""
    return isinstance(output, MovingSchedulerOutput) or bool(output.kv_cache_block_copies)


def merge_reports(first: SchedulerOutput, second: SchedulerOutput) -> SchedulerOutput:
    """Merge the reports of an empty first attempt into the step that runs."""
    second.finished_req_ids = first.finished_req_ids | second.finished_req_ids
    second.free_encoder_mm_hashes = first.free_encoder_mm_hashes + second.free_encoder_mm_hashes
    if first.preempted_req_ids:
        second.preempted_req_ids = first.preempted_req_ids | (second.preempted_req_ids or set())
    if first.kv_cache_block_copies:
        later = second.kv_cache_block_copies or []
        second.kv_cache_block_copies = first.kv_cache_block_copies + later
    return second
