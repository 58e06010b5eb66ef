"""Draft options of a request, as the engine receives them in its sampling parameters."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from vllm.renderers import TokenizeParams

from rbln_backend.api.requests import EXTRA_ARGS, Prediction
from server.request.record import RequestRecord

if TYPE_CHECKING:
    from vllm.sampling_params import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.output_processor import RequestState


def set_draft_options(
    params: SamplingParams, record: RequestRecord | None, prompt: Any, predicted: list[int]
) -> None:
    """Set the draft options of `params`, over whatever a client's `vllm_xargs` has there.

    `predicted` are the token ids of the predicted text.
    """
    options = {
        "off": record is not None and record.drafts.off,
        "prediction": predicted,
        "key": _owner(record, prompt),
    }
    params.extra_args = {**(params.extra_args or {}), EXTRA_ARGS: options}


async def predicted_tokens(engine: AsyncLLM, text: str) -> list[int]:
    """Return the token ids of a predicted text, at most as many as the context has."""
    if not text:
        return []
    params = TokenizeParams(
        max_total_tokens=None, truncate_prompt_tokens=None, add_special_tokens=False
    )
    tokens = await engine.renderer.tokenize_prompt_async({"prompt": text}, params)
    return list(tokens["prompt_token_ids"][: engine.model_config.max_model_len])  # type: ignore[typeddict-item]


def prediction_counts(predicted: list[int], states: list[RequestState]) -> tuple[int, int]:
    """Return the numbers of predicted tokens that the answer has at their place, and has not."""
    prediction = Prediction(predicted)
    for state in states:
        if state.detokenizer is not None:
            prediction.extend(state.detokenizer.output_token_ids)
    matched = min(prediction.matched, len(predicted))
    return matched, len(predicted) - matched


def _owner(record: RequestRecord | None, prompt: Any) -> str | None:
    """Return the owner whose texts may serve as drafts: the API key's, and the cache salt."""
    owner = None if record is None else record.owner or None
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    return owner if salt is None else json.dumps([owner, salt])
