"""Predicates on the next step of a request."""

from __future__ import annotations

from rbln_backend.scheduler.constraints import is_prefill
from rbln_backend.vllm_compat.surface import Request


def needs_chunk(request: Request) -> bool:
    """Return whether ``request`` pools or has more than one token left to compute."""
    pools = request.pooling_params is not None
    return is_prefill(request.num_computed_tokens, request.num_tokens, pools=pools)


def can_decode(request: Request) -> bool:
    """Return whether a decode step can compute its next token, which no running step computes."""
    return not needs_chunk(request) and request.num_computed_tokens < request.num_tokens
