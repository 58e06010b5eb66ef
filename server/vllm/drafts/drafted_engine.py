"""vLLM's engine client, which gives the engine what each HTTP request says of drafts."""

from __future__ import annotations

import json
from typing import Any

from vllm.renderers import TokenizeParams
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector, RequestState

from rbln_backend.speculation.drafter import EXTRA_ARGS
from rbln_backend.speculation.prediction import Prediction
from server.request.record import RequestRecord, record_var
from server.vllm.metered_engine import MeteredLLM


class DraftedLLM(MeteredLLM):
    """Where the engine speculates, sampling parameters carry the request's wishes and its owner.

    What a client writes in their place (`vllm_xargs`) is overwritten: nobody names his own owner.
    """

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **kwargs: Any
    ) -> RequestOutputCollector:
        """Add a request to the engine as AsyncLLM does."""
        record = record_var.get()
        if self.vllm_config.speculative_config is None or not isinstance(params, SamplingParams):
            return await super().add_request(request_id, prompt, params, *args, **kwargs)
        predicted = [] if record is None else await self._predicted(record)
        wishes = {
            "off": record is not None and record.drafts.off,
            "prediction": predicted,
            "key": _owner(record, prompt),
        }
        params.extra_args = {**(params.extra_args or {}), EXTRA_ARGS: wishes}
        collector = await super().add_request(request_id, prompt, params, *args, **kwargs)
        if record is not None and predicted:
            states = self._states(request_id, collector)
            record.prediction_meter = lambda: _counts(predicted, states)
        return collector

    async def _predicted(self, record: RequestRecord) -> list[int]:
        """Return the token ids of the predicted text, as much of it as an answer can have."""
        text = record.drafts.prediction
        if not text:
            return []
        most = self.model_config.max_model_len
        params = TokenizeParams(
            max_total_tokens=None, truncate_prompt_tokens=None, add_special_tokens=False
        )
        tokens = await self.renderer.tokenize_prompt_async({"prompt": text}, params)
        return list(tokens["prompt_token_ids"][:most])  # type: ignore[typeddict-item]


def _owner(record: RequestRecord | None, prompt: Any) -> str | None:
    """Return the owner within which texts are drafts: the key's, and the prefix cache's salt."""
    owner = None if record is None else record.owner or None
    salt = prompt.get("cache_salt") if isinstance(prompt, dict) else None
    return owner if salt is None else json.dumps([owner, salt])


def _counts(predicted: list[int], states: list[RequestState]) -> tuple[int, int]:
    """Return how many of the predicted tokens the answer has where they are due, and has not."""
    prediction = Prediction(predicted)
    for state in states:
        if state.detokenizer is not None:
            prediction.extend(state.detokenizer.output_token_ids)
    matched = min(prediction.matched, len(predicted))
    return matched, len(predicted) - matched
