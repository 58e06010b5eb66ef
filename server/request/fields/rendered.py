"""Fields of requests that are rendered only, where they differ from those of a generation.

A router sends the body of a generation unchanged: fields without a place in the answer are accepted
and named in the header of ignored fields. Pure data.
"""

from __future__ import annotations

from server.request.fields.rows import ignored, obeyed, refused

_NO_PLACE = "it is neither in the prompt nor in the sampling parameters"

RENDERED = (
    *obeyed("return_token_offsets", why="in `token_offsets`, for texts"),
    *refused(
        "use_beam_search",
        why="a beam search has no sampling parameters",
        same=(False,),
        stays=True,
    ),
    *ignored("prediction", "return_progress", why=_NO_PLACE),
    *ignored("speculative", "session_id", why=_NO_PLACE),
    *ignored("include_reasoning", "return_prompt_text", "return_token_ids", why=_NO_PLACE),
    *ignored("return_tokens_as_token_ids", why=_NO_PLACE),
)
"""Rules of both rendering endpoints."""
RENDERED_CHAT = (
    *RENDERED,
    *obeyed(
        "return_assistant_tokens_mask",
        why="where the chat template marks the assistant's tokens",
    ),
)
