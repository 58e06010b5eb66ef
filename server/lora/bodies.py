"""The bodies of the requests that load and unload adapters: vLLM's, field by field."""

from __future__ import annotations

import difflib
import logging
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from server.errors import (
    InvalidTypeError,
    MissingFieldError,
    UnknownFieldError,
    UnsupportedFieldError,
    describe,
)
from server.frontend import JsonObject

logger = logging.getLogger(__name__)


class LoadAdapterBody(BaseModel):
    """What `/v1/load_lora_adapter` takes."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(description="Name that requests will use as their model.")
    lora_path: str = Field(description="PEFT folder; a relative path starts at --lora-root.")
    load_inplace: bool = Field(False, description="Take the place of the adapter of that name.")
    is_3d_lora_weight: bool = Field(
        False,
        description="Only false: no adapters for experts.",
        json_schema_extra={"const": False},
    )


class UnloadAdapterBody(BaseModel):
    """What `/v1/unload_lora_adapter` takes."""

    model_config = ConfigDict(extra="forbid")

    lora_name: str = Field(description="Name of the adapter.")
    lora_int_id: int | None = Field(None, description="Its id, to remove that one alone.")


Body = TypeVar("Body", bound=BaseModel)


def parse_body(
    model: type[Body], body: JsonObject, unknown_fields: Literal["reject", "warn"]
) -> Body:
    """Return the body as a model; raises the `RequestError` of the first field that is wrong."""
    known: JsonObject = {}
    for name, value in body.items():
        if name in model.model_fields:
            known[name] = value
            continue
        near = difflib.get_close_matches(name, model.model_fields, n=1)
        hint = f"; did you mean '{near[0]}'?" if near else "."
        message = f"Unknown field {describe(name)}{hint}"
        if unknown_fields == "reject":
            raise UnknownFieldError(message, param=name)
        logger.warning("Ignored: %s", message)
    if known.get("is_3d_lora_weight"):
        raise UnsupportedFieldError(
            "'is_3d_lora_weight' is for experts, which adapters cannot change here; remove it.",
            param="is_3d_lora_weight",
        )
    try:
        return model.model_validate(known, strict=True)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        name = str(problem["loc"][0])
        if problem["type"] == "missing":
            raise MissingFieldError(f"The field '{name}' is missing.", param=name) from None
        raise InvalidTypeError(
            f"Invalid type for '{name}': {problem['msg']}, got {describe(problem['input'])}.",
            param=name,
        ) from None
