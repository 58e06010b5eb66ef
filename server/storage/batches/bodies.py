"""Body of `POST /v1/batches` and its validation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from server.errors import InvalidValueError, describe
from server.storage.batches.batch import BatchRequest
from server.wire.endpoint import Endpoint

ENDPOINTS = (Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.EMBEDDINGS, Endpoint.RESPONSES)
"""Endpoints that lines of a batch may name."""
WINDOW_S = 24 * 3600
_MAX_PAIRS, _MAX_NAME, _MAX_VALUE = 16, 64, 512
SHORTEST_S, LONGEST_S = 3600, 30 * 24 * 3600
_MAX_KEY = 255


class ExpiresAfter(BaseModel):
    """Expiry of a file."""

    model_config = ConfigDict(extra="forbid")

    anchor: Literal["created_at"] = Field(description="The time is counted from the creation.")
    seconds: int = Field(description="3600 to 2592000.", ge=SHORTEST_S, le=LONGEST_S)


class CreateBatchBody(BaseModel):
    """Body of `POST /v1/batches`."""

    model_config = ConfigDict(extra="forbid")

    input_file_id: str = Field(description="A file of purpose `batch`.")
    endpoint: str = Field(description=f"One of {', '.join(e.value for e in ENDPOINTS)}.")
    completion_window: str = Field(description="Only `24h`.")
    metadata: dict[str, str] | None = Field(None, description="Up to 16 pairs of strings.")
    output_expires_after: ExpiresAfter | None = Field(
        None, description="When the files of answers are deleted."
    )


def batch_request(body: CreateBatchBody, owner: str, idempotency: str | None) -> BatchRequest:
    """Validate a body. Raises `InvalidValueError`."""
    if body.endpoint not in [endpoint.value for endpoint in ENDPOINTS]:
        raise InvalidValueError(
            f"'endpoint' must be one of {', '.join(e.value for e in ENDPOINTS)}, got "
            f"{describe(body.endpoint)}.",
            param="endpoint",
        )
    if body.completion_window != "24h":
        raise InvalidValueError(
            f"'completion_window' must be '24h', got {describe(body.completion_window)}.",
            param="completion_window",
        )
    if idempotency is not None and not 0 < len(idempotency) <= _MAX_KEY:
        raise InvalidValueError(f"An Idempotency-Key has 1 to {_MAX_KEY} characters.")
    _check_metadata(body.metadata or {})
    expires = body.output_expires_after
    keep_s = expires.seconds if expires is not None else 0
    return BatchRequest(
        owner=owner,
        endpoint=body.endpoint,
        input_file=body.input_file_id,
        window_s=WINDOW_S,
        keep_s=keep_s,
        metadata=dict(body.metadata or {}),
        idempotency=idempotency,
    )


def _check_metadata(metadata: Mapping[str, str]) -> None:
    if len(metadata) > _MAX_PAIRS:
        raise InvalidValueError(
            f"'metadata' has {len(metadata)} pairs, and at most {_MAX_PAIRS} may be.",
            param="metadata",
        )
    for name, value in metadata.items():
        if len(name) > _MAX_NAME or len(value) > _MAX_VALUE:
            raise InvalidValueError(
                f"'metadata': names have at most {_MAX_NAME} characters and values {_MAX_VALUE}; "
                f"{describe(name)} has more.",
                param="metadata",
            )
