"""What a request's next step is."""

from __future__ import annotations

from rbln_backend.scheduler.constraints import is_prefill
from rbln_backend.vllm_compat.surface import Request


def needs_chunk(request: Request) -> bool:
    """Whether it has not read its prompt yet, or pools."""
    pools = request.pooling_params is not None
    return is_prefill(request.num_computed_tokens, request.num_tokens, pools=pools)


def can_decode(request: Request) -> bool:
    """Whether its next token can be computed now: not while a step that makes one is under way."""
    return not needs_chunk(request) and request.num_computed_tokens < request.num_tokens
