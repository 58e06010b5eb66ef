"""Limits of a small server."""

from server.request.sizes import RequestLimits

LIMITS = RequestLimits(
    max_messages=4,
    max_prompts=3,
    max_tools=2,
    max_n=4,
    max_stop=2,
    max_logit_bias=3,
    max_model_len=100,
    vocab_size=50,
    max_queued_tokens=150,
    has_priorities=False,
)
