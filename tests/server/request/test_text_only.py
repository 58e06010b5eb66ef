"""What is not text is refused where it stands, and text in any form passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from server.errors import UnsupportedFieldError
from server.request.tables import prompt_fields
from server.request.values import check_values
from server.wire.endpoint import Endpoint
from tests.server.request.limits import LIMITS

TEXT_ONLY = replace(LIMITS, text_only=True)
TEXT = {"type": "text", "text": "a"}
URL = {"url": "http://10.0.0.1/"}
IMAGE = {"type": "image_url", "image_url": URL}


def endpoint_of(body: dict[str, Any]) -> Endpoint:
    """The first endpoint whose requests have prompts under one of these names."""
    return next(endpoint for endpoint in Endpoint if body.keys() & {*prompt_fields(endpoint)})


def said(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"messages": [said(TEXT, IMAGE)]}, "messages[0].content[1]"),
        ({"messages": [[said(TEXT)], [said(IMAGE)]]}, "messages[1][0].content[0]"),
        ({"messages": [said({"image_url": URL})]}, "messages[0].content[0]"),
        ({"messages": [said({"type": "text", "video_url": URL})]}, "messages[0].content[0]"),
        ({"messages": [said({"type": "input_audio"})]}, "messages[0].content[0]"),
        (
            {"messages": [said({"type": "tool_result", "content": [{"type": "image"}]})]},
            "messages[0].content[0].content[0]",
        ),
        ({"input": [said({"type": "input_image"})]}, "input[0].content[0]"),
        ({"inputs": [{"content": [TEXT, IMAGE]}]}, "inputs[0].content[1]"),
        ({"images": ["data:,"]}, "images"),
        ({"query": "a", "documents": ["b", {"content": [IMAGE]}]}, "documents[1].content[0]"),
        ({"queries": {"content": [IMAGE]}, "documents": "b"}, "queries.content[0]"),
    ],
)
def test_media_are_refused_with_their_place(body: dict[str, Any], param: str) -> None:
    with pytest.raises(UnsupportedFieldError) as caught:
        check_values(endpoint_of(body), body, TEXT_ONLY, {})
    assert caught.value.param == param
    assert "text alone" in caught.value.message


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [said(TEXT), {"role": "user", "content": "an image_url in words"}]},
        {"messages": [said({"type": "refusal", "refusal": "no"}, 5), None, "x"]},
        {"input": "a", "images": None},
        {"messages": [said({"type": ["image"]})], "n": 1},
        {"input": [[1, 2], [3]]},
        {"documents": ["a", {"content": [TEXT]}], "tools": [{"type": "image"}]},
    ],
)
def test_text_passes(body: dict[str, Any]) -> None:
    check_values(endpoint_of(body), body, TEXT_ONLY, {})
