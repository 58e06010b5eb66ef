"""Translation of the `guided_*` fields of older vLLM to `structured_outputs`. Pure functions."""

from __future__ import annotations

import logging
from collections.abc import Collection

from server.errors import InvalidValueError, UnsupportedFieldError
from server.structured_outputs.constraint import BACKEND
from server.wire.endpoint import JsonObject

logger = logging.getLogger(__name__)

_CURRENT = "structured_outputs"
_PREFIX = "guided_"
_TRANSLATED = tuple(
    f"{_PREFIX}{name}" for name in ("json", "regex", "choice", "grammar", "whitespace_pattern")
)
_CHOSEN = f"{_PREFIX}decoding_backend"
DEPRECATION = {"Deprecation": "true"}
"""Response header for requests with such fields."""


def without_guided_fields(body: JsonObject, known: Collection[str]) -> tuple[JsonObject, list[str]]:
    """Return the body with the fields translated, and their names.

    Does nothing if `known`, the fields of the request model, lacks `structured_outputs`.
    Raises `UnsupportedFieldError` for a choice of backend, `InvalidValueError` for both forms.
    """
    if _CURRENT not in known or not any(name.startswith(_PREFIX) for name in body):
        return body, []
    if body.get(_CHOSEN) is not None:
        raise UnsupportedFieldError(
            f"'{_CHOSEN}' has no effect: this server has the one grammar backend {BACKEND}.",
            param=_CHOSEN,
        )
    named = [name for name in _TRANSLATED if name in body]
    given = [name for name in named if body[name] is not None]
    if given and body.get(_CURRENT) is not None:
        raise InvalidValueError(
            f"'{given[0]}' is the older form of '{_CURRENT}': send only the latter.", param=given[0]
        )
    dropped = (*named, _CHOSEN)
    translated = {name: value for name, value in body.items() if name not in dropped}
    if given:
        translated[_CURRENT] = {name.removeprefix(_PREFIX): body[name] for name in given}
        logger.warning("Deprecated: %s; send structured_outputs instead", ", ".join(given))
    return translated, given
