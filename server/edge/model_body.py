"""The bodies of our own routes: fields that are known, of the right types, or an error of ours."""

from __future__ import annotations

import difflib
import logging
from typing import Literal, TypeVar

from pydantic import BaseModel, ValidationError

from server.errors import InvalidTypeError, MissingFieldError, UnknownFieldError, describe
from server.frontend import JsonObject

logger = logging.getLogger(__name__)

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
