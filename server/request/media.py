"""Rejection of images, audio and video before anything fetches them.

vLLM's front end fetches the media of a conversation before it checks that the model accepts
them. Pure functions over the body.
"""

from __future__ import annotations

from collections.abc import Iterator

from server.errors import UnsupportedFieldError
from server.request.endpoints import prompt_fields
from server.wire.endpoint import Endpoint, JsonObject

_MEDIA = frozenset(
    (
        *("image", "image_url", "input_image", "image_pil", "image_embeds", "images"),
        *("audio_url", "input_audio", "audio_embeds", "video_url", "video_embeds"),
    )
)
"""Types of content parts, and the fields that hold them if `type` is omitted."""
_OPTIONS = ("mm_processor_kwargs", "media_io_kwargs")
"""Fields with media options, which vLLM passes to the model's processor."""


def refuse_media(endpoint: Endpoint, body: JsonObject) -> None:
    """Raise `UnsupportedFieldError` for the first media option or part of a prompt."""
    fields = [(name, body[name]) for name in prompt_fields(endpoint, body)]
    options = (name for name in ("images", *_OPTIONS) if body.get(name))
    found = next(options, None) or next(_media(fields), None)
    if found is not None:
        raise UnsupportedFieldError(
            f"'{found}' is not supported: the served model takes text alone.", param=found
        )


def _media(places: list[tuple[str, object]]) -> Iterator[str]:
    for path, value in places:
        if isinstance(value, list):
            yield from _media([(f"{path}[{index}]", item) for index, item in enumerate(value)])
        elif isinstance(value, dict):
            kind = value.get("type")
            if (isinstance(kind, str) and kind in _MEDIA) or not _MEDIA.isdisjoint(value):
                yield path
            yield from _media([(f"{path}.content", value.get("content"))])
