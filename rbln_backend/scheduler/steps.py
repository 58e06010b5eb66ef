"""The rules of a step, as pure predicates, and what a step has besides vLLM's ``SchedulerOutput``.

One step is either one chunk of one request's prefill, or one token of each decoding request.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass, field, fields
from typing import Protocol, cast

from rbln_backend.core import HeadCopy, PageMoves, WindowTransfers
from rbln_backend.vllm_compat.surface import (
    CachedRequestData,
    DraftTokenIds,
    ModelRunnerOutput,
    SchedulerOutput,
)

AGING = 8
"""Prompt tokens computed since a prompt's arrival, per own token, after which it is first."""


def is_prefill(num_computed_tokens: int, num_tokens: int, *, pools: bool = False) -> bool:
    """Return whether a request still needs a prefill chunk.

    A request with a single token left is ready to decode: a one-token prompt, or a prompt whose
    prefix hit leaves one token, joins a decode batch directly. A request that
    ``pools`` never decodes: its last token needs a chunk, too.
    """
    return pools or num_computed_tokens < num_tokens - 1


def decode_share(num_decoding: int, max_num_seqs: int, stages: int) -> int:
    """Return how many of the decoding requests one step may take.

    A pipeline runs a step in each of its ``stages`` at the same time. Requests are divided evenly
    among these steps, and no step exceeds the largest bucket.
    """
    return min(max_num_seqs // stages, -(-num_decoding // stages))


def adapter_fits(adapter: int | None, running: Set[int], max_adapters: int) -> bool:
    """Return whether a request with this adapter may run beside the ``running`` adapters."""
    return adapter is None or adapter in running or len(running) < max_adapters


def prefill_block_reason(
    *,
    num_prefilling: int,
    num_waiting: int,
    num_running: int,
    max_num_seqs: int,
    decodes_owed: bool,
) -> str | None:
    """Return why this step cannot be a prefill step, or None if it can.

    ``decodes_owed``: decoding requests exist and have not had their steps since the latest prefill
    chunk; this bounds the time between two tokens of a stream by one chunk.
    """
    if decodes_owed:
        return "decoding requests take this step: they are owed it since the latest prefill chunk"
    if num_prefilling > 0:
        return None
    if num_waiting == 0:
        return "no request waits"
    if num_running >= max_num_seqs:
        return f"all {max_num_seqs} sequence slots are taken"
    return None


class Progress(Protocol):
    """The part of vLLM's ``Request`` that these rules read."""

    @property
    def num_computed_tokens(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def pooling_params(self) -> object: ...


class Decoding(Progress, Protocol):
    """The part of vLLM's ``Request`` that shows whether it has a token to compute."""

    @property
    def num_output_placeholders(self) -> int:
        """Tokens of steps that have not ended, with asynchronous scheduling; else 0."""
        ...

    @property
    def num_prompt_tokens(self) -> int: ...

    @property
    def max_tokens(self) -> int: ...


def needs_chunk(request: Progress) -> bool:
    """Return whether ``request`` pools or has more than one token left to compute."""
    pools = request.pooling_params is not None
    return is_prefill(request.num_computed_tokens, request.num_tokens, pools=pools)


def can_decode(request: Decoding) -> bool:
    """Return whether a decode step can compute its next token, which no running step computes.

    Steps that have not ended may make its last token, which ends it.
    """
    coming = request.num_output_placeholders
    known = request.num_computed_tokens - coming
    if coming and known + 2 >= request.num_prompt_tokens + request.max_tokens:
        return False
    return not needs_chunk(request) and request.num_computed_tokens < request.num_tokens + coming


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
