"""Token types of BERT and its relatives: type 1 marks the tokens of a pair's second text.

vLLM's models of that family read a token's type from a high bit of its id, and clear the bit
before the embedding lookup. So the types need no graph input of their own.
"""

from __future__ import annotations

from torch import nn

from rbln_backend.vllm_compat.surface import NewRequestData, SchedulerOutput

_FIELD = "compressed_token_type_ids"
"""The key with which vLLM's front end passes the position of the first token of type 1."""


class TokenTypes:
    """Writes the types into the prompts of new requests, for models that read them there."""

    def __init__(self, model: nn.Module) -> None:
        from rbln_backend.vllm_compat.bert import (
            TOKEN_TYPE_SHIFT,
            BertEmbedding,
            RobertaEmbedding,
        )

        self._mark = 1 << TOKEN_TYPE_SHIFT
        self._reads_marks = any(
            isinstance(module, BertEmbedding | RobertaEmbedding) for module in model.modules()
        )

    def apply(self, scheduled: SchedulerOutput) -> None:
        """Mark the prompts of new requests, in copies of the scheduler's lists."""
        for request in scheduled.scheduled_new_reqs:
            first = _first_of_document(request)
            prompt = request.prompt_token_ids
            if self._reads_marks and first is not None and prompt is not None:
                marked = [token | self._mark for token in prompt[first:]]
                request.prompt_token_ids = prompt[:first] + marked


def _first_of_document(request: NewRequestData) -> int | None:
    params = request.pooling_params
    if params is None or params.extra_kwargs is None:
        return None
    first: int | None = params.extra_kwargs.get(_FIELD)
    return first
