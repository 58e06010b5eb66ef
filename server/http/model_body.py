"""Validation of request bodies against pydantic models, with our error classes."""

from __future__ import annotations

from typing import TypeVar

from pydantic import BaseModel, ValidationError

from server.errors import InvalidTypeError, MissingFieldError, describe
from server.request.rules import UnknownPolicy, known_fields
from server.wire.endpoint import JsonObject

Body = TypeVar("Body", bound=BaseModel)


def parse_body(model: type[Body], body: JsonObject, unknown_fields: UnknownPolicy) -> Body:
    """Return the body as a model; raises `RequestError` for the first invalid field."""
    known = known_fields(body, model.model_fields, unknown_fields)
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
