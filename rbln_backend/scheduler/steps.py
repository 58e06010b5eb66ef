"""The rules of a step, as pure predicates, and what a step has besides vLLM's ``SchedulerOutput``.

One step is either one chunk of one request's prefill, or one token of each decoding request.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

from rbln_backend.core import PageMoves, WindowTransfers

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


def needs_chunk(request: Request) -> bool:
    """Return whether ``request`` pools or has more than one token left to compute."""
    pools = request.pooling_params is not None
    return is_prefill(request.num_computed_tokens, request.num_tokens, pools=pools)


def can_decode(request: Request) -> bool:
    """Return whether a decode step can compute its next token, which no running step computes.

    Steps that have not ended may make its last token, which ends it.
    """
    coming = request.num_output_placeholders
    known = request.num_computed_tokens - coming
    if coming and known + 2 >= request.num_prompt_tokens + request.max_tokens:
        return False
    return not needs_chunk(request) and request.num_computed_tokens < request.num_tokens + coming


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


def forget_known_tokens(cached: CachedRequestData) -> None:
    """Drop tokens that the ranks already have.

    Upstream sends all tokens of a request that was not in the previous step. Our ranks keep the
    state of a request until it ends. Only a preempted request may have a token that the stages
    before the last have not seen.
    """
    known = cached.all_token_ids
    if known:
        cached.all_token_ids = {i: known[i] for i in cached.resumed_req_ids if i in known}


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
