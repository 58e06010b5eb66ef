"""OpenAI's counts of a prediction's tokens, in the usage of an answer."""

from __future__ import annotations

from typing import Any

from server.request.record import record_var


def add_prediction_counts(usage: Any) -> None:
    """Add to vLLM's usage of a whole answer how much of the prediction was in it, if there is one.

    A token of the prediction is *accepted* where the answer has it when it is due, else *rejected*.
    """
    record = record_var.get()
    if usage is None or record is None or record.prediction_meter is None:
        return
    from vllm.entrypoints.serve.engine.protocol import CompletionTokenUsageInfo

    accepted, rejected = record.prediction_meter()
    known = usage.completion_tokens_details
    usage.completion_tokens_details = CompletionTokenUsageInfo(
        # Set although it is the default: streams omit unset fields.
        reasoning_tokens=0 if known is None else known.reasoning_tokens,
        accepted_prediction_tokens=accepted,
        rejected_prediction_tokens=rejected,
    )
