"""The `guided_*` fields of older vLLM, as today's `structured_outputs`. Pure functions."""

from __future__ import annotations

import logging
from collections.abc import Collection

from server.errors import InvalidValueError, UnsupportedFieldError
from server.structured_outputs.constraint import BACKEND
from server.wire.endpoint import JsonObject

logger = logging.getLogger(__name__)

_NOW = "structured_outputs"
_PREFIX = "guided_"
_TRANSLATED = tuple(
    f"{_PREFIX}{name}" for name in ("json", "regex", "choice", "grammar", "whitespace_pattern")
)
_CHOSEN = f"{_PREFIX}decoding_backend"
DEPRECATION = {"Deprecation": "true"}
"""Header of an answer to a request in the old form."""


def without_guided_fields(body: JsonObject, known: Collection[str]) -> tuple[JsonObject, list[str]]:
    """Return the body in today's form, and the names that were translated.

    Does nothing where the request model, whose fields are `known`, has no `structured_outputs`.
    Raises `UnsupportedFieldError` for a choice of backend, `InvalidValueError` for both forms.
    """
    if _NOW not in known or not any(name.startswith(_PREFIX) for name in body):
        return body, []
    if body.get(_CHOSEN) is not None:
        raise UnsupportedFieldError(
            f"'{_CHOSEN}' has no effect: this server has the one grammar backend {BACKEND}.",
            param=_CHOSEN,
        )
    named = [name for name in _TRANSLATED if name in body]
    given = [name for name in named if body[name] is not None]
    if given and body.get(_NOW) is not None:
        raise InvalidValueError(
            f"'{given[0]}' is the older form of '{_NOW}': send only the latter.", param=given[0]
        )
    dropped = (*named, _CHOSEN)
    today = {name: value for name, value in body.items() if name not in dropped}
    if given:
        today[_NOW] = {name.removeprefix(_PREFIX): body[name] for name in given}
        logger.warning("Deprecated: %s; send structured_outputs instead", ", ".join(given))
    return today, given
