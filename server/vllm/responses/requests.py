"""vLLM's request of the Responses API, and the two forms of it that return no response."""

from __future__ import annotations

from dataclasses import replace

from vllm.config import ModelConfig
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.renderers import TokenizeParams

from server.vllm.rendering.requests import leaving_room


class ResponseRequest(ResponsesRequest):
    """A request for a response."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return the tokenizer parameters of the rendered prompt.

        The chat template has written the special tokens, as in chats; vLLM adds them again.
        """
        params = leaving_room(super().build_tok_params(model_config))
        return replace(params, add_special_tokens=False)


class InputTokensRequest(ResponseRequest):
    """A request for the number of tokens that a response's prompt would have."""

    def build_tok_params(self, model_config: ModelConfig) -> TokenizeParams:
        """Return the tokenizer parameters of the rendered prompt, unlimited unless truncated."""
        params = super().build_tok_params(model_config)
        is_cut = params.truncate_prompt_tokens is not None
        return params if is_cut else replace(params, max_total_tokens=None)


class CompactRequest(ResponseRequest):
    """A request for a compacted conversation."""
