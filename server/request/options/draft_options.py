"""Draft fields of a body; none of them changes the answer. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from server.errors import InvalidValueError, UnsupportedFieldError, describe
from server.request.fields.lookup import obeys
from server.wire.endpoint import Endpoint, JsonObject

OFF = "speculative"
PREDICTION = "prediction"


@dataclass(frozen=True, slots=True)
class DraftOptions:
    """Draft options of a request.

    `off` disables drafts. `prediction` is the expected text of the answer, empty for none.
    """

    off: bool = False
    prediction: str = ""


def settle_drafts(
    endpoint: Endpoint, body: JsonObject, *, speculates: bool
) -> tuple[DraftOptions, list[str]]:
    """Remove the draft fields from `body`; return the options, and the fields without effect.

    `speculates`: the server verifies drafts. Raises `InvalidValueError` or `UnsupportedFieldError`.
    """
    if not obeys(endpoint, OFF):
        return DraftOptions(), []
    wanted = _flag(body.pop(OFF, None))
    predicted = body.pop(PREDICTION, None) if obeys(endpoint, PREDICTION) else None
    text = "" if predicted is None else _text(predicted)
    if predicted is not None and body.get("n") not in (None, 1):
        raise UnsupportedFieldError(
            f"'{PREDICTION}' is of one answer, got 'n': {describe(body['n'])}; send requests of "
            "one answer each.",
            param=PREDICTION,
        )
    off = wanted is False
    ignored = [PREDICTION] if predicted is not None and (off or not speculates) else []
    if wanted and not speculates:
        ignored.append(OFF)
    return DraftOptions(off, "" if ignored else text), ignored


def _flag(given: object) -> bool | None:
    if given is None or isinstance(given, bool):
        return given
    raise InvalidValueError(f"'{OFF}' must be a boolean, got {describe(given)}.", param=OFF)


def _text(given: Any) -> str:
    if not isinstance(given, dict):
        raise InvalidValueError(
            f"'{PREDICTION}' must be an object, got {describe(given)}.", param=PREDICTION
        )
    unknown = next((name for name in given if name not in ("type", "content")), None)
    if unknown is not None:
        raise InvalidValueError(
            f"Unknown field '{PREDICTION}.{unknown}'; a prediction has a type and a content.",
            param=f"{PREDICTION}.{unknown}",
        )
    if given.get("type") != "content":
        raise InvalidValueError(
            f"'{PREDICTION}.type' must be 'content', got {describe(given.get('type'))}.",
            param=f"{PREDICTION}.type",
        )
    content = given.get("content")
    if isinstance(content, list):
        return "".join(
            _part(part, f"{PREDICTION}.content[{index}]") for index, part in enumerate(content)
        )
    if isinstance(content, str):
        return content
    raise InvalidValueError(
        f"'{PREDICTION}.content' must be a text or a list of text parts, got {describe(content)}.",
        param=f"{PREDICTION}.content",
    )


def _part(part: Any, path: str) -> str:
    text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
    if not isinstance(text, str):
        raise InvalidValueError(
            f"'{path}' must be a text part, {{'type': 'text', 'text': ...}}, got {describe(part)}.",
            param=path,
        )
    return text
