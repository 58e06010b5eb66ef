"""The device's scheduling rules, and a request's next step, as pure predicates.

One step is either one chunk of one request's prefill, or one token of each decoding request.
"""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol

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
