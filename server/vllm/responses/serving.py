"""vLLM's serving class of the Responses API, which also counts input tokens."""

from __future__ import annotations

from functools import cache
from typing import Any

from pydantic_core import to_json
from starlette.responses import Response


@cache
def counting() -> type:
    """Return the class, which cannot be made before vLLM's serving modules are imported."""
    from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
    from vllm.entrypoints.serve.engine.protocol import ErrorResponse

    class Counting(OpenAIServingResponses):
        """Counts input tokens too; `EngineClient` checks the length of prompts."""

        def _validate_generator_input(self, engine_input: Any) -> None:
            """Do nothing."""

        async def count_input_tokens(self, request: Any, raw_request: Any = None) -> Any:  # noqa: ARG002 (as vLLM's methods)
            """Return how many tokens the prompt has, or vLLM's error."""
            rendered = await self._render_resolved_response_inputs(request, None)
            if isinstance(rendered, ErrorResponse):
                return rendered
            count = self._extract_prompt_len(rendered.engine_input)
            return Response(to_json({"object": "response.input_tokens", "input_tokens": count}))

    return Counting
