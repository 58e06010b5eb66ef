"""vLLM's serving class of rendered requests, called as its other serving classes are."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic import RootModel
from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateRequest


class RenderedPrompts(RootModel[list[GenerateRequest]]):
    """Rendered requests of the prompts of a completion."""


@cache
def answering_renders() -> type:
    """Return the class, which cannot be made before vLLM's serving modules are imported."""
    from vllm.entrypoints.scale_out.render.serving import ServingRender
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    class AnswersRenders(ServingRender):
        """Takes the HTTP request, too, and returns one model for the prompts of a completion."""

        async def answer_chat(self, request: Any, _: Any) -> GenerateRequest | ErrorResponse:
            """Return the token ids and the sampling parameters of a chat."""
            return await self.render_chat_request(request)

        async def answer_completion(self, request: Any, _: Any) -> RenderedPrompts | ErrorResponse:
            """Return the token ids and the sampling parameters of each prompt."""
            result = await self.render_completion_request(request)
            return result if isinstance(result, ErrorResponse) else RenderedPrompts(result)

    return AnswersRenders
