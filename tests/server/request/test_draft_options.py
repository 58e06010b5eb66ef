"""Fields about drafts are taken off, and are never in the way of an answer."""

from __future__ import annotations

from typing import Any

import pytest

from server.errors import InvalidValueError, RequestError, UnsupportedFieldError
from server.request.options import DraftOptions, pop_drafts
from server.request.tables import extra_schemas
from server.wire.endpoint import Endpoint

TEXT = {"type": "content", "content": "a b"}
PARTS = {
    "type": "content",
    "content": [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}],
}


@pytest.mark.parametrize(
    ("body", "speculates", "options", "ignored"),
    [
        ({}, True, DraftOptions(), []),
        ({"prediction": TEXT}, True, DraftOptions(prediction="a b"), []),
        ({"prediction": PARTS, "n": 1}, True, DraftOptions(prediction="a b"), []),
        ({"prediction": None, "speculative": None}, True, DraftOptions(), []),
        ({"speculative": False}, True, DraftOptions(off=True), []),
        ({"speculative": True}, True, DraftOptions(), []),
        # A hint without effect.
        ({"prediction": TEXT}, False, DraftOptions(), ["prediction"]),
        ({"speculative": False}, False, DraftOptions(off=True), []),
        ({"speculative": True}, False, DraftOptions(), ["speculative"]),
        (
            {"prediction": TEXT, "speculative": False},
            True,
            DraftOptions(off=True),
            ["prediction"],
        ),
    ],
)
def test_a_chat_says_what_it_wants(
    body: dict[str, Any], speculates: bool, options: DraftOptions, ignored: list[str]
) -> None:
    body = {"model": "m", **body}
    assert pop_drafts(Endpoint.CHAT, body, speculates=speculates) == (options, ignored)
    assert body.keys() <= {"model", "n"}


@pytest.mark.parametrize(
    "endpoint", [Endpoint.CHAT, Endpoint.COMPLETION, Endpoint.RESPONSES, Endpoint.MESSAGES]
)
def test_every_answer_can_be_had_without_drafts(endpoint: Endpoint) -> None:
    assert pop_drafts(endpoint, {"speculative": False}, speculates=True)[0].off
    assert extra_schemas(endpoint)["speculative"]["type"] == ["boolean", "null"]


def test_elsewhere_the_fields_stay_unknown() -> None:
    body = {"prediction": TEXT}
    assert pop_drafts(Endpoint.COMPLETION, body, speculates=True) == (DraftOptions(), [])
    assert body == {"prediction": TEXT}
    body = {"speculative": False}
    assert pop_drafts(Endpoint.EMBEDDINGS, body, speculates=True) == (DraftOptions(), [])
    assert body == {"speculative": False}


@pytest.mark.parametrize("speculates", [True, False])
@pytest.mark.parametrize(
    ("body", "error", "param"),
    [
        ({"prediction": TEXT, "n": 2}, UnsupportedFieldError, "prediction"),
        ({"prediction": "text"}, InvalidValueError, "prediction"),
        ({"prediction": {"type": "text", "content": "a"}}, InvalidValueError, "prediction.type"),
        ({"prediction": {"type": "content"}}, InvalidValueError, "prediction.content"),
        ({"prediction": {**TEXT, "extra": 1}}, InvalidValueError, "prediction.extra"),
        (
            {"prediction": {"type": "content", "content": [{"type": "image_url"}]}},
            InvalidValueError,
            "prediction.content[0]",
        ),
        ({"speculative": 0}, InvalidValueError, "speculative"),
    ],
)
def test_what_is_no_wish_is_refused_by_name(
    body: dict[str, Any], speculates: bool, error: type[RequestError], param: str
) -> None:
    with pytest.raises(error) as caught:
        pop_drafts(Endpoint.CHAT, dict(body), speculates=speculates)
    assert caught.value.param == param
    assert param in caught.value.message
